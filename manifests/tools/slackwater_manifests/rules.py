"""Recording rules and alerts, once for both of their forms.

Owns what is recorded, when somebody is called and what they should do then.  `documents` gives the plain rule file
of a Prometheus and the PrometheusRule of its operator.  An alert is a symptom that a person must act on: `page` now,
`ticket` this week.
"""

from dataclasses import dataclass
from typing import Any

USEFUL = "serving|background|training"
"""States of a GPU second that are of use; what died with a worker is subtracted."""


@dataclass(frozen=True, slots=True)
class Record:
    """A number that dashboards and alerts share.  name: level:metric:operations."""

    name: str
    expr: str


@dataclass(frozen=True, slots=True)
class Alert:
    """summary: what is wrong, one line; step: what to do next."""

    name: str
    expr: str
    for_s: int
    severity: str
    summary: str
    step: str


def useful(window: str) -> str:
    """The useful share of all GPUs that are not broken."""
    return (
        f'(sum(rate(fleet_gpu_seconds_total{{state=~"{USEFUL}"}}[{window}]))'
        f" - sum(rate(fleet_lost_gpu_seconds_total[{window}])))"
        f' / sum(rate(fleet_gpu_seconds_total{{state!="broken"}}[{window}]))'
    )


def quantile(q: float, histogram: str, window: str = "5m", matchers: str = "", by: str = "le") -> str:
    """A quantile of a histogram's rate."""
    return f"histogram_quantile({q}, sum by ({by}) (rate({histogram}_bucket{matchers}[{window}])))"


RECORDS = (
    Record("fleet:gpus:sum", "sum(fleet_gpus)"),
    Record("fleet:gpu_allocated:ratio", '1 - sum(fleet_gpus{state=~"free|broken"}) / sum(fleet_gpus)'),
    Record("fleet:gpu_busy:ratio", "avg(DCGM_FI_PROF_GR_ENGINE_ACTIVE)"),
    Record("fleet:gpu_useful:ratio_rate5m", useful("5m")),
    Record("fleet:gpu_useful:ratio_rate1h", useful("1h")),
    Record(
        "fleet:background_lost:ratio_rate1h",
        "sum(rate(fleet_lost_gpu_seconds_total[1h]))"
        ' / (sum(rate(fleet_gpu_seconds_total{state="background"}[1h])) > 0)',
    ),
    Record("tts:slots_used:ratio", "sum(tts_requests_running) / sum(tts_slots)"),
    Record("tts:first_audio_seconds:p50_rate5m", quantile(0.5, "tts_first_audio_seconds")),
    Record("tts:first_audio_seconds:p95_rate5m", quantile(0.95, "tts_first_audio_seconds")),
    Record("tts:first_audio_seconds:p99_rate5m", quantile(0.99, "tts_first_audio_seconds")),
    Record("edge:requests:rate5m", "sum(rate(edge_requests_total[5m]))"),
    Record(
        "edge:errors:ratio_rate5m",
        '(sum(rate(edge_requests_total{code=~"5.."}[5m])) or vector(0)) / (sum(rate(edge_requests_total[5m])) > 0)',
    ),
    Record(
        "edge:errors:ratio_rate1h",
        '(sum(rate(edge_requests_total{code=~"5.."}[1h])) or vector(0)) / (sum(rate(edge_requests_total[1h])) > 0)',
    ),
)

SERVING_ALERTS = (
    Alert(
        "TtsFirstAudioSlow",
        "tts:first_audio_seconds:p99_rate5m > 0.4 and edge:requests:rate5m > 1",
        300,
        "page",
        "First audio takes {{ $value | humanizeDuration }} at the 99th percentile",
        "Look at what waits (Traffic), then at reclaims under way, then for one bad flavor.",
    ),
    Alert(
        "TtsErrorBudgetBurn",
        "edge:errors:ratio_rate5m > 14.4 * 0.001 and edge:errors:ratio_rate1h > 14.4 * 0.001",
        0,
        "page",
        "{{ $value | humanizePercentage }} of all requests fail; a month's budget of 0.1 % is gone in two days",
        "Roll the last revision of engine or gateway back: put the former template into the InferenceDeployment.",
    ),
    Alert(
        "TtsRejecting",
        "(sum(rate(edge_rejected_total[10m])) or vector(0)) / (sum(rate(edge_requests_total[10m])) > 0) > 0.02",
        600,
        "page",
        "{{ $value | humanizePercentage }} of all requests are turned away",
        "Does cleaning still hold GPUs?  Then the way of taking them back is stuck: slackwater explain the service."
        "  Else the fleet is full: send traffic to another data centre.",
    ),
    Alert(
        "TtsStutter",
        '1 - sum(rate(tts_stream_gap_seconds_bucket{le="0.5"}[10m]))'
        " / (sum(rate(tts_stream_gap_seconds_count[10m])) > 0) > 0.01",
        600,
        "ticket",
        "{{ $value | humanizePercentage }} of the streams ran dry for more than half a second",
        "Too many streams a replica (lower slotsPerReplica), or a proxy on the way that buffers.",
    ),
    Alert(
        "TtsStreamsCut",
        "sum(increase(edge_broken_streams_total[10m])) > 3",
        0,
        "page",
        "{{ $value | humanize }} answers ended in their middle within ten minutes",
        "Engines die or are deleted while they speak: look at their restarts and at who deleted them (audit log).",
    ),
)

FLEET_ALERTS = (
    Alert(
        "FleetSignalStale",
        "max by (service) (fleet_signal_age_seconds) > 30",
        60,
        "page",
        "No traffic signal of {{ $labels.service }} for {{ $value | humanizeDuration }}",
        "The operator holds and takes nothing back.  Is the gateway's pod ready, does a network policy shut :9090?",
    ),
    Alert(
        "FleetEvictionSlow",
        quantile(0.99, "fleet_eviction_seconds", "10m", '{phase="decision_to_free"}') + " > 20",
        600,
        "page",
        "Taking a GPU back takes {{ $value | humanizeDuration }} at the 99th percentile",
        "Workers ignore the signal, their storage is full or slow, or a kubelet hangs: slackwater get reclaims.",
    ),
    Alert(
        "FleetBackgroundAboveInference",
        'sum(edge_queued) > 0 and sum(fleet_gpus{state="background"}) > 0',
        120,
        "page",
        "Requests wait while cleaning holds GPUs",
        "Priority inversion: slackwater explain the service; a floor (minWorkers) or maxReplicas may be the reason.",
    ),
    Alert(
        "FleetUsefulLow",
        'fleet:gpu_useful:ratio_rate1h < 0.85 and sum(fleet_gpus{state="background"}) > 0',
        3600,
        "ticket",
        "Only {{ $value | humanizePercentage }} of the GPUs are of use",
        "Which state holds the rest?  starting: slow images or models; free: lendAfter, no open work; draining: grace.",
    ),
    Alert(
        "FleetLostWork",
        "fleet:background_lost:ratio_rate1h > 0.05",
        3600,
        "ticket",
        "{{ $value | humanizePercentage }} of the cleaning is lost to take-backs",
        "Items too long for flushTimeout, or GPUs change hands too often: raise lendAfter.",
    ),
    Alert(
        "FleetThrash",
        "sum(increase(fleet_eviction_gpus_total[1h]))"
        ' / (sum(avg_over_time(fleet_gpus{state="background"}[1h])) > 0) > 6',
        1800,
        "ticket",
        "Each lent GPU is taken back {{ $value | humanize }} times an hour",
        "Raise lending.lendAfter of the pool or autoscaling.burstSlots of the service.",
    ),
    Alert(
        "FleetAllocatedIdle",
        'sum by (namespace, pod) (kube_pod_container_resource_requests{resource="nvidia_com_gpu"})'
        " and on (namespace, pod) (max by (namespace, pod) (max_over_time(DCGM_FI_DEV_GPU_UTIL[15m])) < 5)",
        900,
        "ticket",
        "{{ $labels.namespace }}/{{ $labels.pod }} holds {{ $value }} GPUs and does nothing with them",
        "A hung process or a forgotten pod: ask its owner, or delete it.",
    ),
    Alert(
        "FleetGpuBroken",
        'sum by (pool, flavor) (fleet_gpus{state="broken"}) > 0',
        600,
        "ticket",
        "{{ $value }} GPUs of {{ $labels.flavor }} in {{ $labels.pool }} are broken",
        "Cordon the node: work leaves it, replicas move first.  Then drain and repair.",
    ),
    Alert(
        "GpuXidErrors",
        'sum by (Hostname, gpu, xid) (increase(DCGM_EXP_XID_ERRORS_COUNT{xid=~"48|63|64|74|79|94|95"}[10m])) > 0',
        0,
        "ticket",
        "GPU {{ $labels.gpu }} of {{ $labels.Hostname }} reports XID {{ $labels.xid }}",
        "Cordon the node, drain it, replace the GPU.",
    ),
    Alert(
        "DcgmMissing",
        'count(kube_node_status_allocatable{resource="nvidia_com_gpu"} > 0) unless count(DCGM_FI_DEV_POWER_USAGE) > 0',
        600,
        "ticket",
        "{{ $value }} nodes have GPUs and no GPU reports its power",
        "The exporter or the driver is gone; the hardware rows of the dashboard are blind.",
    ),
)

OPERATOR_ALERTS = (
    Alert(
        "OperatorNoLeader",
        "(sum(fleet_leader) or vector(0)) != 1",
        120,
        "page",
        "{{ $value }} operators lead; it must be one",
        "None: look at the pods and at the Lease slackwater-operator.  Two: clocks or a cut network; delete one pod.",
    ),
    Alert(
        "OperatorReconcileSlow",
        quantile(0.99, "fleet_reconcile_seconds") + " > 0.25",
        600,
        "ticket",
        "A tick takes {{ $value | humanizeDuration }} at the 99th percentile",
        "A slow API server, or more objects than planned for: see the row The operator.",
    ),
    Alert(
        "OperatorReconcileErrors",
        "sum by (kind) (increase(fleet_reconcile_errors_total[10m])) > 20",
        0,
        "ticket",
        "{{ $value | humanize }} refused or failed steps of kind {{ $labels.kind }} in ten minutes",
        "The operator's log names each; conditions of the resources say it in words.",
    ),
    Alert(
        "OperatorWatchStalled",
        "max by (resource) (fleet_watch_stalled_seconds) > 120",
        0,
        "page",
        "No news of {{ $labels.resource }} for {{ $value | humanizeDuration }}",
        "The pod should have been restarted by its liveness probe; is the API server well?",
    ),
    Alert(
        "SlurmBridgeBlind",
        "time() - slurm_bridge_last_look_timestamp_seconds > 60",
        300,
        "page",
        "Slurm did not answer for {{ $value | humanizeDuration }}",
        "Is slurmctld up?  Cleaning jobs keep their size meanwhile; Slurm itself still preempts them.",
    ),
    Alert(
        "SlurmRequeueStorm",
        "sum by (cluster) (increase(slurm_bridge_requeues_total[10m])) > 50",
        300,
        "ticket",
        "{{ $value | humanize }} workers were sent back in ten minutes on {{ $labels.cluster }}",
        "Short training jobs come and go, or nodes flap: see the row Slurm.",
    ),
    Alert(
        "Watchdog",
        "vector(1)",
        0,
        "none",
        "Alerts reach you",
        "Nothing to do.  When this one is missing, the way from Prometheus to you is broken.",
    ),
)

ALERTS = {"serving": SERVING_ALERTS, "fleet": FLEET_ALERTS, "operator": OPERATOR_ALERTS}


def groups() -> list[dict[str, Any]]:
    """The rule groups, as Prometheus reads them."""
    recorded = {
        "name": "slackwater-records",
        "interval": "15s",
        "rules": [{"record": record.name, "expr": record.expr} for record in RECORDS],
    }
    alerting = [
        {"name": f"slackwater-{room}", "rules": [_alert(one) for one in rules]} for room, rules in ALERTS.items()
    ]
    return [recorded, *alerting]


def _alert(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expr,
        **({"for": f"{alert.for_s}s"} if alert.for_s else {}),
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "description": alert.step},
    }


def documents() -> dict[str, dict[str, Any]]:
    """File name below monitoring/ -> document."""
    return {
        "rules.yaml": {"groups": groups()},
        "rules-crd.yaml": {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": {"name": "slackwater", "namespace": "slackwater-system"},
            "spec": {"groups": groups()},
        },
    }
