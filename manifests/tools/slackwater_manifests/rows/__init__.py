"""What the dashboard shows, row by row, from the fleet as a whole to the operator's own health.

Owns the order.  The rows stand in `fleet`, `serving` and `inside`.
"""

from slackwater_manifests.rows.fleet import FLEET, RECLAIMS
from slackwater_manifests.rows.inside import HARDWARE, OPERATOR, SLURM
from slackwater_manifests.rows.serving import FIRST_AUDIO, TRAFFIC

ROWS = (FLEET, RECLAIMS, TRAFFIC, FIRST_AUDIO, OPERATOR, SLURM, HARDWARE)
