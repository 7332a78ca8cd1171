"""The rows of the machinery: the operator itself, Slurm, the hardware."""

from slackwater_manifests.panels import Draw, Panel, Query, Row, lines, quantiles, stack

OPERATOR = Row(
    "The operator",
    (
        Panel(
            "Leaders",
            "One of the replicas leads.  None or two for longer than a change of leader pages somebody.",
            Draw.STAT,
            "short",
            (Query("sum(fleet_leader)", "leaders"),),
            width=4,
        ),
        Panel(
            "Replicas up",
            "Operators that answer the scrape, and which version each runs.",
            Draw.TABLE,
            "short",
            (Query("sum by (instance, version) (fleet_build_info)"),),
            width=6,
        ),
        lines(
            "One tick, and its writes",
            "Level-based: each tick looks at everything.  The promise is 250 ms with 5,000 pods.  Written: from the "
            "plan until the API server has answered all of it; no tick waits for that.",
            "s",
            *quantiles("fleet_reconcile_seconds", legend="tick"),
            *quantiles("fleet_write_seconds", legend="written"),
            width=7,
        ),
        stack(
            "Refused or failed steps a second",
            "By kind; the log names each, conditions say it in words.",
            "short",
            Query("sum by (kind) (rate(fleet_reconcile_errors_total[$__rate_interval]))", "{{kind}}"),
            width=7,
        ),
        stack(
            "API writes a second",
            "At most four for each worker that is taken back.",
            "reqps",
            Query(
                'sum by (verb, resource) (rate(fleet_api_requests_total{verb!~"get|list|watch"}[$__rate_interval]))',
                "{{verb}} {{resource}}",
            ),
        ),
        lines(
            "API lists a minute",
            "None in steady state: watches carry everything.",
            "short",
            Query(
                'sum by (resource) (rate(fleet_api_requests_total{verb="list"}[$__rate_interval])) * 60', "{{resource}}"
            ),
        ),
        lines(
            "Silence of the watches",
            "Since the last event or bookmark.  Past 90 s the liveness probe fails and the pod starts anew.",
            "s",
            Query("max by (resource) (fleet_watch_stalled_seconds)", "{{resource}}"),
        ),
    ),
)

SLURM = Row(
    "Slurm",
    (
        stack(
            "GPUs under Slurm, by state",
            "Training takes what it needs by itself; cleaning (background) follows what is idle.",
            "short",
            Query("sum by (state) (slurm_bridge_gpus)", "{{state}}"),
        ),
        lines(
            "GPUs that jobs wait for",
            "By Slurm's own reason.",
            "short",
            Query("sum by (reason) (slurm_bridge_pending_gpus)", "{{reason}}"),
        ),
        lines(
            "Wait of training that took GPUs from cleaning",
            "From submission to start, in Slurm's whole seconds.",
            "s",
            *quantiles("slurm_bridge_preempt_seconds"),
        ),
        stack(
            "Workers sent back a minute, by cause",
            "They are queued again and resume at their cursor.",
            "short",
            Query("sum by (reason) (rate(slurm_bridge_requeues_total[$__rate_interval])) * 60", "{{reason}}"),
        ),
        lines(
            "Items, by state",
            "Of all cleaning jobs on Slurm.",
            "short",
            Query("sum by (state) (slurm_bridge_items)", "{{state}}"),
        ),
        lines(
            "Calls of Slurm: p95, failures a minute",
            "A slow slurmctld makes everything slow.",
            "s",
            Query(
                "histogram_quantile(0.95, sum by (le, call) (rate(slurm_bridge_api_seconds_bucket[$__rate_interval])))",
                "{{call}}",
            ),
            Query("sum by (call) (rate(slurm_bridge_api_errors_total[$__rate_interval])) * 60", "{{call}} failures"),
        ),
    ),
    folded=True,
)

HARDWARE = Row(
    "Hardware, by dcgm-exporter and kube-state-metrics",
    (
        lines(
            "Busy, SM active, memory bandwidth",
            "A decoding engine is bound by memory bandwidth; low SM activity is normal for it.",
            "percentunit",
            Query("avg(DCGM_FI_PROF_GR_ENGINE_ACTIVE)", "busy"),
            Query("avg(DCGM_FI_PROF_SM_ACTIVE)", "SM active"),
            Query("avg(DCGM_FI_PROF_DRAM_ACTIVE)", "memory bandwidth"),
            highest=1,
        ),
        lines(
            "Power",
            "The cheapest check of busy.",
            "watt",
            Query("sum(DCGM_FI_DEV_POWER_USAGE)", "all GPUs"),
        ),
        lines(
            "Energy for a second of audio",
            "All GPUs' energy over all audio: falls when replicas are full.",
            "joule",
            Query(
                "sum(rate(DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION[5m])) / 1000 / sum(rate(tts_audio_seconds_total[5m]))",
                "J per audio second",
            ),
        ),
        Panel(
            "Held by a pod, idle for ten minutes",
            "Whose GPUs do nothing.  Other people's pods show up here, too.",
            Draw.TABLE,
            "short",
            (
                Query(
                    'sum by (namespace, pod) (kube_pod_container_resource_requests{resource="nvidia_com_gpu"}) and on'
                    " (namespace, pod) (max by (namespace, pod) (avg_over_time(DCGM_FI_DEV_GPU_UTIL[10m])) < 5)"
                ),
            ),
        ),
        lines(
            "Broken, as Kubernetes sees it",
            "GPUs of a node that are not allocatable.",
            "short",
            Query(
                'sum by (node) (kube_node_status_capacity{resource="nvidia_com_gpu"}'
                ' - kube_node_status_allocatable{resource="nvidia_com_gpu"})',
                "{{node}}",
            ),
        ),
        stack(
            "XID errors in ten minutes",
            "By code: 48, 63, 64, 74, 79, 94 and 95 mean the GPU must be looked at.",
            "short",
            Query("sum by (xid) (increase(DCGM_EXP_XID_ERRORS_COUNT[10m]))", "{{xid}}"),
        ),
    ),
    folded=True,
)
