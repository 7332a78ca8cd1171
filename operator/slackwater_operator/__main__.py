"""`python -m slackwater_operator` is the console script `slackwater`."""

from slackwater_operator.start import main

main()
