"""Metrics of other programs that our rules and the dashboard name, and whose they are.

Owns the list.  Everything else that a query names must be a metric of our own code; a test compares them.
"""

KUBE_STATE_METRICS = "kube-state-metrics"
DCGM_EXPORTER = "dcgm-exporter"
PROMETHEUS = "Prometheus itself, for every target that it scrapes"

FOREIGN = {
    "up": PROMETHEUS,
    "kube_pod_container_resource_requests": KUBE_STATE_METRICS,
    "kube_node_status_allocatable": KUBE_STATE_METRICS,
    "kube_node_status_capacity": KUBE_STATE_METRICS,
    "DCGM_FI_DEV_GPU_UTIL": DCGM_EXPORTER,
    "DCGM_FI_DEV_POWER_USAGE": DCGM_EXPORTER,
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": DCGM_EXPORTER,
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": DCGM_EXPORTER,
    "DCGM_FI_PROF_DRAM_ACTIVE": DCGM_EXPORTER,
    "DCGM_FI_PROF_SM_ACTIVE": DCGM_EXPORTER,  # commented out in the exporter's own list of counters: switch it on
    "DCGM_EXP_XID_ERRORS_COUNT": DCGM_EXPORTER,
}
"""Name -> who makes it."""
