"""The messages of the kubelet's device-plugin and pod-resources protocols, as far as a test plug-in speaks them.

Owns the wire format alone: protobuf messages built at import from the tables below, so that no compiler for .proto
files is needed.  The sources are k8s.io/kubelet's pkg/apis/deviceplugin/v1beta1 and pkg/apis/podresources/v1; fields
that are not named here are skipped by protobuf when they arrive.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

VERSION = "v1beta1"
REGISTER = "/v1beta1.Registration/Register"
PLUGIN_SERVICE = "v1beta1.DevicePlugin"
LIST_PODS = "/v1.PodResourcesLister/List"

_Field = descriptor_pb2.FieldDescriptorProto
# Message: {field: (number, type)}; a type is a scalar's name or a message of the same file, "*" before it: repeated.
_PLUGIN = {
    "Empty": {},
    "DevicePluginOptions": {"pre_start_required": (1, "bool"), "get_preferred_allocation_available": (2, "bool")},
    "RegisterRequest": {
        "version": (1, "string"),
        "endpoint": (2, "string"),
        "resource_name": (3, "string"),
        "options": (4, "DevicePluginOptions"),
    },
    "Device": {"ID": (1, "string"), "health": (2, "string")},
    "ListAndWatchResponse": {"devices": (1, "*Device")},
    "ContainerAllocateRequest": {"devices_ids": (1, "*string")},
    "AllocateRequest": {"container_requests": (1, "*ContainerAllocateRequest")},
    # On the wire a map is a repeated message of key and value.
    "Env": {"key": (1, "string"), "value": (2, "string")},
    "ContainerAllocateResponse": {"envs": (1, "*Env")},
    "AllocateResponse": {"container_responses": (1, "*ContainerAllocateResponse")},
}
_RESOURCES = {
    "ListPodResourcesRequest": {},
    "ContainerDevices": {"resource_name": (1, "string"), "device_ids": (2, "*string")},
    "ContainerResources": {"name": (1, "string"), "devices": (2, "*ContainerDevices")},
    "PodResources": {"name": (1, "string"), "namespace": (2, "string"), "containers": (3, "*ContainerResources")},
    "ListPodResourcesResponse": {"pod_resources": (1, "*PodResources")},
}


def _messages(package: str, tables: dict[str, dict[str, tuple[int, str]]]) -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name=f"slackwater/{package}.proto", package=package, syntax="proto3")
    for name, fields in tables.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            bare = kind.removeprefix("*")
            label = _Field.LABEL_REPEATED if kind.startswith("*") else _Field.LABEL_OPTIONAL
            entry = message.field.add(name=field, number=number, label=label)
            if bare in tables:
                entry.type, entry.type_name = _Field.TYPE_MESSAGE, f".{package}.{bare}"
            else:
                entry.type = {"string": _Field.TYPE_STRING, "bool": _Field.TYPE_BOOL}[bare]
    # A pool of our own: a program that also holds the generated messages has these names in the default one.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in tables}


PLUGIN = _messages("v1beta1", _PLUGIN)
RESOURCES = _messages("v1", _RESOURCES)
