"""What people read of our resources: their status fields, conditions and the Events of their changes.

Built from the views of the cluster, the newest plan and what gateways and keepers said; written by `writer` alone.
"""
