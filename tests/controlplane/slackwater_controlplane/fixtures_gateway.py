"""Fixtures for tests that need container images, or a gateway before a node cluster; part of the plug-in `fixtures`.

Owns when they are skipped, no cluster logic.
"""

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # every test run loads this plug-in; what it needs is loaded when a test asks
    from slackwater_controlplane.build import Programs
    from slackwater_controlplane.envoy import EnvoyGateway
    from slackwater_controlplane.images import Images
    from slackwater_controlplane.node.cluster import NodeCluster

__all__ = ["container_images", "envoy_gateway"]


@pytest.fixture(scope="session")
def container_images() -> "Images":
    """The images in this machine's cache; a test that asks for one that is not there builds it."""
    from slackwater_controlplane.build import cache_folder
    from slackwater_controlplane.images import Images

    images = Images(cache_folder(os.environ), os.environ)
    if (why := images.why_not()) is not None:
        pytest.skip(why)
    return images


@pytest.fixture(scope="session")
def envoy_gateway(
    container_images: "Images", controlplane_programs: "Programs", node_cluster: "NodeCluster"
) -> "EnvoyGateway":
    """Envoy Gateway on the node cluster, with nothing applied yet."""
    from slackwater_controlplane.envoy import CONTROLLER, EnvoyGateway, envoy_image

    if (why := controlplane_programs.why_not(CONTROLLER)) is not None:
        pytest.skip(why)
    image = envoy_image(container_images, controlplane_programs, os.environ)
    installed = EnvoyGateway(node_cluster, image, controlplane_programs.module_folder(CONTROLLER))
    installed.install()
    return installed
