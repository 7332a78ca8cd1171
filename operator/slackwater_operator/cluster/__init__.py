"""What a plan is carried out on: one adapter a kind of cluster, all behind `base.Cluster`."""
