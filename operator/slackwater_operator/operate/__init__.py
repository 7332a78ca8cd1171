"""`slackwater operator run`: the process that keeps a cluster of Kubernetes nodes as its resources say.

Stands on the API client (`kube`), the kinds (`resources`) and the cluster of the policy (`cluster.kube`).  The parts:
`process` (one replica), `lead` (what only the leader does), `intake` (kopf, probes), `watches` and `catalog` (copies of
the cluster, specs as values), `signals` with `gateway` and `progress` (who is polled, by `remote`), `services`,
`revisions` and `rollout` (what the policy is given), `children` with `containers` and `endpoints` (gateways, keepers,
gates), `statuses`, `decisions` and `archive` (what people read), `dryrun`, `metrics`, and for the command line `sight`,
`show` and `cli`.
"""
