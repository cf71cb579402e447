"""A Kubernetes API server of one namespace: EndpointSlices, ConfigMaps, Leases, resource versions. In-process HTTP.

A test double: no real API server can be had where these tests run. It keeps what the scheduler relies on: a write under
an old resource version is refused, a list takes a label selector, and a Lease's times are read as strictly as there.
"""

import re

from aiohttp import web

MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}(Z|[+-]\d\d:\d\d)")


def endpoint_slice(service, *endpoints, port=50100, address_type="IPv4", port_name="grpc"):
    """A slice; each endpoint is an address, or an address and whether it is ready."""
    pairs = [item if isinstance(item, tuple) else (item, True) for item in endpoints]
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": f"{service}-{port}", "labels": {"kubernetes.io/service-name": service}},
        "addressType": address_type,
        "ports": [{"name": "metrics", "port": 9465}, {"name": port_name, "port": port, "protocol": "TCP"}],
        "endpoints": [{"addresses": [address], "conditions": {"ready": ready}} for address, ready in pairs] or None,
    }


class FakeApiServer:
    """`async with` it; its objects may be changed at any time, `status` makes every answer an error."""

    def __init__(self, namespace="forwardplane"):
        self.slices = []
        self.config_maps = {}
        self.leases = {}
        self.status = None
        self.requests = []
        self.before_replace = None
        """Called once before the next write, as another writer would come between."""
        self._version = 1
        self._app = web.Application()
        core = f"/api/v1/namespaces/{namespace}/{{kind:configmaps}}/{{name}}"
        leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/{{kind:leases}}/{{name}}"
        slices = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        for path in (core, leases):
            self._app.add_routes([web.get(path, self._read), web.put(path, self._replace)])
        self._app.add_routes([web.get(slices, self._list)])
        self._runner = web.AppRunner(self._app, access_log=None)
        self.url = ""

    async def __aenter__(self):
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_):
        await self._runner.cleanup()

    def add_config_map(self, name, annotations=None):
        self._version += 1
        self.config_maps[name] = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name, "annotations": annotations, "resourceVersion": str(self._version)},
        }

    def add_lease(self, name, **spec):
        """As the manifest makes it: of nobody, unless `spec` says more."""
        self._version += 1
        self.leases[name] = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": name, "resourceVersion": str(self._version)},
            "spec": spec,
        }

    def holder(self, name):
        """Who has the Lease; empty: nobody."""
        return self.leases[name]["spec"].get("holderIdentity", "")

    def annotation(self, name, key="forwardplane.dev/epoch"):
        return self.config_maps[name]["metadata"]["annotations"][key]

    def _refusal(self, request):
        self.requests.append((request.method, request.path))
        if self.status is not None:
            return _status(self.status)
        return None

    async def _list(self, request):
        if (refusal := self._refusal(request)) is not None:
            return refusal
        key, _, value = request.query.get("labelSelector", "").partition("=")
        found = [item for item in self.slices if item["metadata"]["labels"].get(key) == value]
        return web.json_response({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSliceList", "items": found})

    async def _read(self, request):
        if (refusal := self._refusal(request)) is not None:
            return refusal
        found = self._objects(request).get(request.match_info["name"])
        return web.json_response(found) if found else _status(404)

    async def _replace(self, request):
        if (refusal := self._refusal(request)) is not None:
            return refusal
        if self.before_replace is not None:
            other, self.before_replace = self.before_replace, None
            other()
        objects, body, name = self._objects(request), await request.json(), request.match_info["name"]
        if name not in objects:
            return _status(404)
        if body["metadata"]["resourceVersion"] != objects[name]["metadata"]["resourceVersion"]:
            return _status(409)
        times = [text for key, text in body.get("spec", {}).items() if key.endswith("Time")]
        if not all(MICRO_TIME.fullmatch(text) for text in times):
            return _status(400)
        self._version += 1
        body["metadata"]["resourceVersion"] = str(self._version)
        objects[name] = body
        return web.json_response(body)

    def _objects(self, request):
        return {"configmaps": self.config_maps, "leases": self.leases}[request.match_info["kind"]]


def _status(code):
    return web.json_response({"kind": "Status", "status": "Failure", "code": code}, status=code)
