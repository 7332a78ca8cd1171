"""Rules about GPUs, nodes, memory and the limits that a whole fleet of workers meets.

Pure.  Rules about nodes and gres.conf say nothing when those were not given.
"""

from collections.abc import Iterator

from slackwater_slurm.check.facts import Site, with_parameters
from slackwater_slurm.check.finding import Finding, Rule, Severity


def select_type(site: Site) -> Iterator[Finding]:
    found = site.text("SelectType")
    if found != "select/cons_tres":
        whole = "jobs get whole nodes" if found == "select/linear" else "--gpus and GPU types are not understood"
        yield Finding(
            "select-type",
            Severity.ERROR,
            "slurm.conf",
            f"SelectType={found}",
            f"{whole}: cleaning cannot fill single GPUs",
            "SelectType=select/cons_tres",
        )


def gres_types(site: Site) -> Iterator[Finding]:
    found = site.text("GresTypes")
    if "gpu" not in found.split(","):
        yield Finding(
            "gres-types",
            Severity.ERROR,
            "slurm.conf",
            f"GresTypes={found}",
            "GPUs are not a resource: nobody can ask for one",
            f"GresTypes={','.join(filter(None, [found, 'gpu']))}",
        )


def shared_nodes(site: Site) -> Iterator[Finding]:
    cleaning = site.cleaning_partition
    if cleaning is None or not site.train_partitions:
        return
    train = {node for partition in site.train_partitions for node in partition.nodes}
    if missing := sorted(train - set(cleaning.nodes)):
        yield Finding(
            "nodes-without-cleaning",
            Severity.WARNING,
            f"partition {cleaning.name}",
            f"not over {_some(missing)}",
            "GPUs there idle whenever training leaves them",
            f"PartitionName={cleaning.name} Nodes={','.join(sorted(train | set(cleaning.nodes)))} …",
        )
    if extra := sorted(set(cleaning.nodes) - train):
        yield Finding(
            "nodes-without-training",
            Severity.NOTE,
            f"partition {cleaning.name}",
            f"also over {_some(extra)}",
            "training never takes those: its partitions are not over them",
            f"PartitionName={site.train[0]} Nodes={','.join(sorted(train | set(cleaning.nodes)))} …",
        )


def nodes_with_gpus(site: Site) -> Iterator[Finding]:
    if site.nodes is None or site.cleaning_partition is None:
        return
    without = sorted(node.name for node in site.cleaning_nodes if not node.gpus)
    if without:
        yield Finding(
            "nodes-without-gpus",
            Severity.ERROR if len(without) == len(site.cleaning_nodes) else Severity.NOTE,
            f"partition {site.cleaning}",
            f"no GPUs on {_some(without)}",
            "a worker that asks for a GPU cannot run there",
            f"NodeName={','.join(without)} … Gres=gpu:TYPE:COUNT",
        )
    if not site.cleaning_nodes:
        yield Finding(
            "nodes-without-gpus",
            Severity.ERROR,
            f"partition {site.cleaning}",
            "no nodes",
            "nothing runs there",
            f"PartitionName={site.cleaning} … Nodes=ALL",
        )


def gpu_types(site: Site) -> Iterator[Finding]:
    untyped = sorted(node.name for node in site.cleaning_nodes if node.gpus.get(""))
    if untyped:
        yield Finding(
            "gpu-types",
            Severity.NOTE,
            "slurm.conf",
            f"GPUs without a type on {_some(untyped)}",
            "training cannot ask for a type, so it may get, and preempt, the wrong GPUs",
            f"NodeName={','.join(untyped)} … Gres=gpu:TYPE:COUNT",
        )


def nodes_valid(site: Site) -> Iterator[Finding]:
    invalid = sorted(node.name for node in site.nodes or () if "INVAL" in node.state.upper())
    if invalid:
        yield Finding(
            "nodes-invalid",
            Severity.ERROR,
            "gres.conf",
            f"State=INVAL on {_some(invalid)}",
            "slurmd found other GPUs than slurm.conf claims: nothing starts there",
            f"NodeName={','.join(invalid)} Name=gpu Type=TYPE File=/dev/nvidia[0-N]",
        )


def max_array_size(site: Site) -> Iterator[Finding]:
    limit, gpus = site.number("MaxArraySize"), site.cleaning_gpus.total
    if limit is not None and gpus >= limit:
        yield Finding(
            "max-array-size",
            Severity.WARNING,
            "slurm.conf",
            f"MaxArraySize={limit}, {gpus} GPUs",
            'one array cannot fill them: sbatch says "Invalid job array specification" and names no limit',
            f"MaxArraySize={2 * gpus}",
        )


def max_job_count(site: Site) -> Iterator[Finding]:
    limit, gpus = site.number("MaxJobCount"), site.cleaning_gpus.total
    if limit is not None and gpus and limit < 4 * gpus:
        yield Finding(
            "max-job-count",
            Severity.WARNING,
            "slurm.conf",
            f"MaxJobCount={limit}, {gpus} GPUs",
            "workers, and what ended in the last minutes, may fill the queue: then nobody can submit (not measured)",
            f"MaxJobCount={max(10_000, 20 * gpus)}",
        )


def queue_depth(site: Site) -> Iterator[Finding]:
    gpus = site.cleaning_gpus.total
    if not gpus:
        return
    for name, default in (("default_queue_depth", 100), ("bf_max_job_test", 500)):
        given = site.parameter("SchedulerParameters", name)
        found = int(given) if given is not None and given.isdecimal() else default
        if found < gpus:
            line = with_parameters(site.text("SchedulerParameters"), **{name: str(2 * gpus)})
            yield Finding(
                "queue-depth",
                Severity.WARNING,
                "slurm.conf",
                f"{name}={found}, {gpus} GPUs",
                "one pass does not reach all waiting workers, so GPUs refill in several (504 GPUs: 5.4 s when raised)",
                f"SchedulerParameters={line}",
            )


def devices(site: Site) -> Iterator[Finding]:
    plugins = site.text("TaskPlugin").split(",")
    if "task/cgroup" not in plugins:
        others = [plugin for plugin in plugins if plugin not in ("", "task/none")]
        yield Finding(
            "task-plugin",
            Severity.WARNING,
            "slurm.conf",
            f"TaskPlugin={site.text('TaskPlugin')}",
            "a worker can reach GPUs that are not its own, training's too (not measured)",
            f"TaskPlugin={','.join(['task/cgroup', *others])}",
        )
    elif site.text("ConstrainDevices").lower() == "no":
        yield Finding(
            "constrain-devices",
            Severity.WARNING,
            "cgroup.conf",
            "ConstrainDevices=no",
            "a worker can reach GPUs that are not its own, training's too (not measured)",
            "ConstrainDevices=yes",
        )


def gres_conf(site: Site) -> Iterator[Finding]:
    if site.gres_conf is None:
        return
    lines = [line.split("#")[0].strip() for line in site.gres_conf.splitlines()]
    detects = any("autodetect=" in line.lower() and "autodetect=off" not in line.lower() for line in lines)
    for line in lines:
        words = dict(word.partition("=")[::2] for word in line.split())
        keys = {key.lower(): value for key, value in words.items()}
        if keys.get("name") != "gpu" or detects:
            continue
        if "file" not in keys:
            yield Finding(
                "gres-file",
                Severity.ERROR,
                "gres.conf",
                line,
                "GPUs are only counted: CUDA_VISIBLE_DEVICES stays unset, and every worker takes GPU 0",
                f"{line} File=/dev/nvidia[0-{int(keys['count']) - 1 if keys.get('count', '').isdecimal() else 'N'}]",
            )
        elif not keys["file"].startswith("/dev/"):
            yield Finding(
                "gres-file",
                Severity.ERROR,
                "gres.conf",
                line,
                "only a character device is given to a job: with another file CUDA_VISIBLE_DEVICES stays unset",
                line.replace(keys["file"], "/dev/nvidia[0-N]"),
            )
        if "type" not in keys:
            yield Finding(
                "gres-type",
                Severity.NOTE,
                "gres.conf",
                line,
                "training cannot ask for a type of GPU",
                f"{line} Type=TYPE",
            )


RULES: tuple[Rule, ...] = (
    select_type,
    gres_types,
    shared_nodes,
    nodes_with_gpus,
    gpu_types,
    nodes_valid,
    max_array_size,
    max_job_count,
    queue_depth,
    devices,
    gres_conf,
)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
