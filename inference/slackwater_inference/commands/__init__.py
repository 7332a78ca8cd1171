"""The commands of `slackwater engine`, one module each.

Own what the command line says and checks.  Mounted by `cli`.
"""
