"""The rows of the GPUs: who holds them, and how they change hands."""

from slackwater_manifests.panels import Draw, Panel, Query, Row, heat, lines, quantiles, stack
from slackwater_manifests.rules import USEFUL

SHOWN = 'pool=~"$pool", flavor=~"$flavor"'

FLEET = Row(
    "Where every GPU second goes",
    (
        Panel(
            "Useful",
            "GPU seconds that served, trained or cleaned for good, of all seconds of GPUs that are not broken."
            "  Cleaning that died with its worker is subtracted.  This is the number that the 90 % is about.",
            Draw.STAT,
            "percentunit",
            (Query("fleet:gpu_useful:ratio_rate5m", "now"), Query("fleet:gpu_useful:ratio_rate1h", "last hour")),
            width=5,
            height=5,
            warn=0.9,
            bad=0.8,
        ),
        Panel(
            "GPUs by state",
            "How many GPUs are in which state now.  Full is good: what is free earns nothing.",
            Draw.STAT,
            "short",
            (Query(f"sum by (state) (fleet_gpus{{{SHOWN}}})", "{{state}}"),),
            width=14,
            height=5,
        ),
        Panel(
            "GPUs owned",
            "All GPUs of all pools, broken ones too: what every ratio here is a share of.",
            Draw.STAT,
            "short",
            (Query("fleet:gpus:sum", "owned"),),
            width=5,
            height=5,
        ),
        stack(
            "Who holds the GPUs",
            "Each GPU is in exactly one state, so the height is what is owned; cleaning should fill the gaps.",
            "short",
            Query(f"sum by (state) (fleet_gpus{{{SHOWN}}})", "{{state}}"),
            width=14,
        ),
        lines(
            "The ladder from allocated to useful",
            "Allocated is what kubectl sees; busy is that a kernel ran; useful is this project's number; SM active"
            " says how much of the silicon worked.  The gaps between them are different problems.",
            "percentunit",
            Query("fleet:gpu_allocated:ratio", "allocated"),
            Query("fleet:gpu_busy:ratio", "busy (dcgm)"),
            Query("fleet:gpu_useful:ratio_rate5m", "useful"),
            Query("avg(DCGM_FI_PROF_SM_ACTIVE)", "SM active (dcgm)"),
            width=10,
            highest=1,
        ),
        Panel(
            "GPUs by pool, flavor and state",
            "The same numbers for each GPU type of each data centre.",
            Draw.TABLE,
            "short",
            (Query(f"sum by (pool, flavor, state) (fleet_gpus{{{SHOWN}}})"),),
        ),
        Panel(
            "GPU hours by state, in this time range",
            "What the range's GPU hours went to.",
            Draw.BARS,
            "h",
            (Query(f"sum by (state) (increase(fleet_gpu_seconds_total{{{SHOWN}}}[$__range])) / 3600", "{{state}}"),),
        ),
        lines(
            "Useful, by pool",
            "Before what was lost is subtracted.  One low pool is a place to look; all low is a setting.",
            "percentunit",
            Query(
                f'sum by (pool) (rate(fleet_gpu_seconds_total{{state=~"{USEFUL}"}}[5m]))'
                ' / sum by (pool) (rate(fleet_gpu_seconds_total{state!="broken"}[5m]))',
                "{{pool}}",
            ),
            highest=1,
        ),
    ),
)

RECLAIMS = Row(
    "GPUs that change hands",
    (
        lines(
            "From the decision to a free GPU",
            "Workers are told, make their work durable and go.  The promise is two seconds with workers that flush in"
            " half a second.",
            "s",
            *quantiles("fleet_eviction_seconds", '{phase="decision_to_free"}'),
        ),
        lines(
            "From the spike to the decision, and from free to serving",
            "What lies before and after the take-back itself: signals and ticks; image, model and readiness.",
            "s",
            *quantiles("fleet_eviction_seconds", '{phase="spike_to_decision"}', legend="spike → decision"),
            *quantiles("fleet_eviction_seconds", '{phase="free_to_serving"}', legend="free → serving"),
        ),
        heat(
            "Take-backs by how long they took",
            "Every GPU taken back, decision to free; a second hill to the top is a worker that does not listen.",
            "s",
            'fleet_eviction_seconds_bucket{phase="decision_to_free"}',
        ),
        stack(
            "GPUs taken back a minute, by reason",
            "traffic: requests rose; training: a job waits; node: it was cordoned or broke; limit: above a maximum.",
            "short",
            Query("sum by (reason) (rate(fleet_eviction_gpus_total[$__rate_interval])) * 60", "{{reason}}"),
        ),
        stack(
            "How take-backs ended, a minute",
            "checkpointed: its receipt was read back and holds.  lost and timeout should not be there.",
            "short",
            Query("sum by (outcome) (rate(fleet_evictions_total[$__rate_interval])) * 60", "{{outcome}}"),
        ),
        stack(
            "Reclaims finished a minute, by phase",
            "Each take-back of one or many GPUs is a Reclaim that anyone can read: kubectl get reclaims -A.",
            "short",
            Query("sum by (phase) (rate(fleet_reclaims_total[$__rate_interval])) * 60", "{{phase}}"),
        ),
        lines(
            "Work lost, GPU seconds a minute",
            "Cleaning seconds that were never made durable: the cost of changing hands.",
            "s",
            Query("sum(rate(fleet_lost_gpu_seconds_total[$__rate_interval])) * 60", "lost"),
        ),
        Panel(
            "Work lost, of all cleaning in the last hour",
            "Above 5 % GPUs change hands too often, or items are too long for flushTimeout.",
            Draw.STAT,
            "percentunit",
            (Query("fleet:background_lost:ratio_rate1h", "lost"),),
            warn=0.02,
            bad=0.05,
        ),
        lines(
            "Pods that we own, by kind and state",
            "Replicas, workers, gateways, keepers and gates as the operator sees them.",
            "short",
            Query("sum by (kind, state) (fleet_children)", "{{kind}} {{state}}"),
        ),
    ),
)
