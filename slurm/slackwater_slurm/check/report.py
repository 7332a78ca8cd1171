"""Runs all rules over a site and writes what they found, for a person or for a program.

Pure.  Called by `commands`.
"""

from dataclasses import asdict

from slackwater_slurm.check import delays, lossless, resources, script
from slackwater_slurm.check.facts import Site
from slackwater_slurm.check.finding import Finding, Rule, Severity

RULES: tuple[Rule, ...] = (*lossless.RULES, *delays.RULES, *resources.RULES, *script.RULES)
_ORDER = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.NOTE: 2}


def findings(site: Site) -> tuple[Finding, ...]:
    """Everything that the rules say, worst first."""
    found = [finding for rule in RULES for finding in rule(site)]
    return tuple(sorted(found, key=lambda finding: _ORDER[finding.severity]))


def is_failed(found: tuple[Finding, ...]) -> bool:
    """Is there more than notes?"""
    return any(finding.severity != Severity.NOTE for finding in found)


def document(site: Site, found: tuple[Finding, ...]) -> dict[str, object]:
    """The report for a program."""
    return {
        "version": str(site.version),
        "cluster": site.text("ClusterName"),
        "train": list(site.train),
        "cleaning": site.cleaning,
        "counts": {severity.value: _count(found, severity) for severity in Severity},
        "findings": [asdict(finding) for finding in found],
    }


def lines(site: Site, found: tuple[Finding, ...]) -> list[str]:
    """The report for a person: three lines a finding, then a sentence."""
    shown: list[str] = []
    for finding in found:
        shown += [
            f"{finding.severity.upper():7} {finding.where}: {finding.found}",
            f"        costs  {finding.cost}",
            f"        set    {finding.fix}",
        ]
    if found:
        counts = ", ".join(
            f"{number} {severity.value}{'s' if number != 1 else ''}"
            for severity in Severity
            if (number := _count(found, severity))
        )
    else:
        counts = "nothing found"
    about = f"Slurm {site.version}, cluster {site.text('ClusterName') or 'unnamed'}"
    return [
        *shown,
        f"{about}: {counts} by {len(RULES) - 1} rules{' and the script’s' if site.script is not None else ''}",
    ]


def _count(found: tuple[Finding, ...], severity: Severity) -> int:
    return sum(finding.severity == severity for finding in found)
