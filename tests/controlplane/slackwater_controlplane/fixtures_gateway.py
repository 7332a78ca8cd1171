"""Fixtures for tests that need container images, or a gateway before a node cluster.

Owns when they are skipped, no cluster logic.
"""

import os

import pytest

from slackwater_controlplane.build import Programs, cache_folder
from slackwater_controlplane.envoy import CONTROLLER, EnvoyGateway, envoy_image
from slackwater_controlplane.images import Images
from slackwater_controlplane.node.cluster import NodeCluster

__all__ = ["container_images", "envoy_gateway"]


@pytest.fixture(scope="session")
def container_images() -> Images:
    """The images in this machine's cache; a test that asks for one that is not there builds it."""
    images = Images(cache_folder(os.environ), os.environ)
    if (why := images.why_not()) is not None:
        pytest.skip(why)
    return images


@pytest.fixture(scope="session")
def envoy_gateway(container_images: Images, node_cluster: NodeCluster) -> EnvoyGateway:
    """Envoy Gateway on the node cluster, with nothing applied yet."""
    programs = Programs(cache_folder(os.environ), os.environ)
    if (why := programs.why_not(CONTROLLER)) is not None:
        pytest.skip(why)
    image = envoy_image(container_images, programs, os.environ)
    installed = EnvoyGateway(node_cluster, image, programs.module_folder(CONTROLLER))
    installed.install()
    return installed
