"""`slackwater operator run`: the process that keeps a cluster of Kubernetes nodes as its resources say.

Stands on the API client (`kube`), the kinds (`resources`) and the cluster of the policy (`cluster.kube`).  The parts:
`process` (the whole), `lead` (what only the leader does), `intake` (kopf, probes), `catalog` (resources as they were
read), `signals` and `progress` (gateways and keepers), `services` and `rollout` (what the policy is given), `children`
(gateways, keepers, gate Jobs), `statuses` (what people read), `dryrun`, `metrics`, `show` and `cli`.
"""
