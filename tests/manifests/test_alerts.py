"""When an alert fires and when it does not, by promtool's own evaluation of the rule file."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

RULES = Path(__file__).parents[2] / "manifests/monitoring/rules.yaml"
PROMTOOL = shutil.which("promtool")

pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="no promtool here (Debian's package prometheus)")


@dataclass(frozen=True, slots=True)
class Case:
    """series: name and labels -> values, one a minute, in promtool's notation.  labels: of the alert, if it fires."""

    alert: str
    series: dict[str, str]
    fires: bool
    labels: dict[str, str] | None = None
    minutes: int = 60
    within: str | None = None  # the summary must have it


GPUS = 'fleet_gpus{pool="east",flavor="h200",state="%s"}'
SECONDS = 'fleet_gpu_seconds_total{pool="east",flavor="h200",state="%s"}'
BUCKETS = ("0.25", "0.5", "+Inf")


def histogram(name: str, labels: str, under: dict[str, str]) -> dict[str, str]:
    comma = "," if labels else ""
    return {f'{name}_bucket{{{labels}{comma}le="{bound}"}}': values for bound, values in under.items()}


CASES = [
    pytest.param(
        Case("OperatorNoLeader", {}, fires=True, labels={}, within="0 operators lead"), id="no operator at all"
    ),
    pytest.param(
        Case(
            "OperatorNoLeader",
            {'fleet_leader{pod="a"}': "0x60", 'fleet_leader{pod="b"}': "0x60"},
            fires=True,
            labels={},
        ),
        id="two operators, no leader",
    ),
    pytest.param(
        Case(
            "OperatorNoLeader",
            {'fleet_leader{pod="a"}': "1x60", 'fleet_leader{pod="b"}': "1x60"},
            fires=True,
            labels={},
        ),
        id="two leaders",
    ),
    pytest.param(
        Case("OperatorNoLeader", {'fleet_leader{pod="a"}': "0x60", 'fleet_leader{pod="b"}': "1x60"}, fires=False),
        id="one leader",
    ),
    pytest.param(
        Case(
            "FleetSignalStale",
            {'fleet_signal_age_seconds{service="a/tts"}': "1x50 40x10"},
            fires=True,
            labels={"service": "a/tts"},
            within="a/tts for 40s",
        ),
        id="a signal that stopped",
    ),
    pytest.param(
        Case("FleetSignalStale", {'fleet_signal_age_seconds{service="a/tts"}': "1x60"}, fires=False), id="fresh signals"
    ),
    pytest.param(
        Case(
            "FleetBackgroundAboveInference",
            {'edge_queued{pod="g"}': "5x60", GPUS % "background": "8x60"},
            fires=True,
            labels={},
        ),
        id="requests wait while cleaning runs",
    ),
    pytest.param(
        Case(
            "FleetBackgroundAboveInference",
            {'edge_queued{pod="g"}': "5x60", GPUS % "background": "0x60"},
            fires=False,
        ),
        id="requests wait and nothing is lent",
    ),
    pytest.param(
        Case(
            "FleetUsefulLow",
            {
                SECONDS % "serving": "0+120x180",
                SECONDS % "free": "0+240x180",
                "fleet_lost_gpu_seconds_total": "0x180",
                GPUS % "background": "1x180",
            },
            fires=True,
            labels={},
            minutes=180,
            within="33.33%",
        ),
        id="a third is of use",
    ),
    pytest.param(
        Case(
            "FleetUsefulLow",
            {
                SECONDS % "serving": "0+120x180",
                SECONDS % "background": "0+240x180",
                SECONDS % "broken": "0+600x180",
                "fleet_lost_gpu_seconds_total": "0+1x180",
                GPUS % "background": "1x180",
            },
            fires=False,
            minutes=180,
        ),
        id="broken GPUs do not count against it",
    ),
    pytest.param(
        Case(
            "FleetLostWork",
            {SECONDS % "background": "0+600x180", "fleet_lost_gpu_seconds_total": "0+60x180"},
            fires=True,
            labels={},
            minutes=180,
            within="10%",
        ),
        id="a tenth of the cleaning is lost",
    ),
    pytest.param(
        Case(
            "FleetEvictionSlow",
            {
                f'fleet_eviction_seconds_bucket{{phase="decision_to_free",le="{bound}"}}': values
                for bound, values in {"20": "0x60", "40": "0+5x60", "+Inf": "0+5x60"}.items()
            },
            fires=True,
            labels={},
        ),
        id="GPUs come back late",
    ),
    pytest.param(
        Case("FleetGpuBroken", {GPUS % "broken": "2x60"}, fires=True, labels={"pool": "east", "flavor": "h200"}),
        id="broken GPUs",
    ),
    pytest.param(
        Case(
            "TtsFirstAudioSlow",
            {
                **histogram("tts_first_audio_seconds", "", {"0.25": "0+10x60", "0.5": "0+50x60", "+Inf": "0+100x60"}),
                'edge_requests_total{code="200"}': "0+600x60",
            },
            fires=True,
            labels={},
        ),
        id="late first audio",
    ),
    pytest.param(
        Case(
            "TtsFirstAudioSlow",
            {
                **histogram("tts_first_audio_seconds", "", dict.fromkeys(BUCKETS, "0+100x60")),
                'edge_requests_total{code="200"}': "0+600x60",
            },
            fires=False,
        ),
        id="prompt first audio",
    ),
    pytest.param(
        Case(
            "TtsErrorBudgetBurn",
            {'edge_requests_total{code="200"}': "0+600x60", 'edge_requests_total{code="503"}': "0+30x60"},
            fires=True,
            labels={},
        ),
        id="five in a hundred fail",
    ),
    pytest.param(
        Case("TtsErrorBudgetBurn", {'edge_requests_total{code="200"}': "0+600x60"}, fires=False), id="no request fails"
    ),
    pytest.param(
        Case(
            "TtsRejecting",
            {'edge_requests_total{code="429"}': "0+60x60", 'edge_rejected_total{reason="queue_full"}': "0+60x60"},
            fires=True,
            labels={},
        ),
        id="all are turned away",
    ),
    pytest.param(
        Case(
            "DcgmMissing",
            {'kube_node_status_allocatable{node="n1",resource="nvidia_com_gpu"}': "8x60"},
            fires=True,
            labels={},
        ),
        id="GPUs without an exporter",
    ),
    pytest.param(
        Case(
            "DcgmMissing",
            {
                'kube_node_status_allocatable{node="n1",resource="nvidia_com_gpu"}': "8x60",
                'DCGM_FI_DEV_POWER_USAGE{gpu="0"}': "300x60",
            },
            fires=False,
        ),
        id="GPUs with an exporter",
    ),
    pytest.param(
        Case(
            "OperatorWatchStalled",
            {'fleet_watch_stalled_seconds{resource="pods"}': "300x60"},
            fires=True,
            labels={"resource": "pods"},
        ),
        id="a silent watch",
    ),
    pytest.param(
        Case(
            "SlurmBridgeBlind",
            {'slurm_bridge_last_look_timestamp_seconds{job="s"}': "0x60"},
            fires=True,
            labels={"job": "s"},
        ),
        id="Slurm is silent",
    ),
    pytest.param(Case("Watchdog", {}, fires=True, labels={}), id="watchdog"),
]


@pytest.mark.parametrize("case", CASES)
def test_an_alert_fires_when_it_should(case: Case, tmp_path: Path) -> None:
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
                "alert_rule_test": [{"eval_time": f"{case.minutes}m", "alertname": case.alert, "exp_alerts": []}],
            }
        ],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test))

    done = subprocess.run(
        [str(PROMTOOL), "test", "rules", "test.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    output = done.stdout + done.stderr
    if case.fires:  # promtool prints what it got instead of no alert; no need to guess a computed number here
        got = output.partition("got:")[2]
        assert f'alertname="{case.alert}"' in got, output
        for name, value in (case.labels or {}).items():
            assert f'{name}="{value}"' in got
        assert (case.within or "") in got
    else:
        assert done.returncode == 0, output
