"""The rows of those who wait for speech: traffic against capacity, and how soon they hear something."""

from slackwater_manifests.panels import Draw, Panel, Query, Row, heat, lines, quantiles, stack

TRAFFIC = Row(
    "Traffic and what is there for it",
    (
        lines(
            "GPUs wanted and given",
            "Wanted is what the policy reads from traffic, headroom included; given is what serves or stands ready.",
            "short",
            Query("sum(fleet_demand_gpus)", "wanted"),
            Query('sum(fleet_gpus{state=~"serving.*"})', "given"),
            Query('sum(fleet_gpus{state="starting"})', "on their way"),
        ),
        lines(
            "Requests in flight and waiting",
            "As the gateways count them: the signal that leads.  Waiting longer than a take-back is trouble.",
            "short",
            Query("sum(edge_in_flight)", "in flight"),
            Query("sum(edge_queued)", "waiting"),
        ),
        lines(
            "Decode slots used",
            "Streams that speak, of all that could at once.  Near 1 new ones wait.",
            "percentunit",
            Query("tts:slots_used:ratio", "used"),
            highest=1,
        ),
        stack(
            "Requests a second, by status",
            "Answers of the gateways.  429 is honest overload, 499 a client that left.",
            "reqps",
            Query("sum by (code) (rate(edge_requests_total[$__rate_interval]))", "{{code}}"),
        ),
        lines(
            "Turned away, tried again, cut",
            "Refused at the gateway; retried on another replica before the first byte; ended in their middle.",
            "reqps",
            Query("sum by (reason) (rate(edge_rejected_total[$__rate_interval]))", "refused: {{reason}}"),
            Query("sum by (reason) (rate(edge_retries_total[$__rate_interval]))", "again: {{reason}}"),
            Query("sum(rate(edge_broken_streams_total[$__rate_interval]))", "cut"),
        ),
        lines(
            "Clients that left",
            "While queued, before the first byte, or in the stream.",
            "reqps",
            Query("sum by (phase) (rate(edge_client_aborts_total[$__rate_interval]))", "{{phase}}"),
        ),
        Panel(
            "Age of the newest signal, by service",
            "Past staleAfter (5 s) the operator holds: nothing shrinks and nothing is taken back.",
            Draw.BARS,
            "s",
            (Query("max by (service) (fleet_signal_age_seconds)", "{{service}}"),),
            warn=2,
            bad=5,
        ),
        lines(
            "GPUs wanted, by service",
            "Whose traffic it is, and how much of it is speech at this moment.",
            "short",
            Query("sum by (service) (fleet_demand_gpus)", "{{service}} wants"),
            Query("sum by (service) (fleet_serving_load_gpus)", "{{service}} speaks"),
        ),
        stack(
            "Replicas, by state",
            "ready ones take requests; leaving ones finish their streams.",
            "short",
            Query("sum by (state) (fleet_replicas)", "{{state}}"),
        ),
    ),
)

FIRST_AUDIO = Row(
    "How soon they hear something",
    (
        lines(
            "First audio, from opening the stream",
            "Measured in the engine, waiting for a slot included.",
            "s",
            *quantiles("tts_first_audio_seconds"),
        ),
        heat("First audio, all of it", "Two hills: two flavors, or reclaims.", "s", "tts_first_audio_seconds_bucket"),
        lines(
            "First byte at the gateway",
            "With the way to the replica and the wait for one: what the client feels.",
            "s",
            *quantiles("edge_ttfb_seconds"),
        ),
        lines(
            "Waiting for a slot",
            "From a stream's first text to its slot in the engine.",
            "s",
            *quantiles("tts_queue_seconds"),
        ),
        lines(
            "Oldest text that waits",
            "Zero is normal.  It rises first when slots run out.",
            "s",
            Query("max(tts_queue_age_seconds)", "oldest"),
        ),
        Panel(
            "Streams that stuttered",
            "Streams whose listener had nothing to play for over half a second, of those that ended in ten minutes.",
            Draw.STAT,
            "percentunit",
            (
                Query(
                    '1 - sum(rate(tts_stream_gap_seconds_bucket{le="0.5"}[10m]))'
                    " / sum(rate(tts_stream_gap_seconds_count[10m]))",
                    "stuttered",
                ),
            ),
            warn=0.005,
            bad=0.01,
        ),
        lines(
            "Audio made, seconds a second",
            "How many listeners' worth of speech the fleet makes.",
            "short",
            Query("sum by (gpu_model) (rate(tts_audio_seconds_total[$__rate_interval]))", "{{gpu_model}}"),
        ),
        lines(
            "One decode step",
            "By batch size; grows slowly until the GPU is full.",
            "s",
            Query(
                "histogram_quantile(0.95, sum by (le, batch_bucket)"
                ' (rate(tts_step_seconds_bucket{phase="decode"}[$__rate_interval])))',
                "batch {{batch_bucket}} p95",
            ),
        ),
        lines(
            "KV blocks held",
            "At 1 frames wait for memory instead of compute.",
            "percentunit",
            Query("max(tts_kv_used_ratio)", "fullest"),
            Query("avg(tts_kv_used_ratio)", "mean"),
            highest=1,
        ),
    ),
)
