"""What can go wrong with the test cluster, each said in one message.  Owns no behaviour."""


class ControlPlaneError(Exception):
    """The test cluster could not do what was asked."""


class BuildError(ControlPlaneError):
    """A program could not be built."""


class ToolsMissing(BuildError):
    """This machine lacks what a build needs: Go, or a library."""


class StartError(ControlPlaneError):
    """A process did not start, or ended before it was ready."""


class PortInUse(StartError):
    """Somebody listens on a port that a server needs; it might be an older cluster, so nothing talks to it."""
