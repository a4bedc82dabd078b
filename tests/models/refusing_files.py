"""File systems whose errors are not OSErrors, as those of bucket clients."""

import fsspec
from fsspec.spec import AbstractFileSystem


class NoCredentialsError(Exception):
    """An error as of a bucket client."""


class Locked(AbstractFileSystem):
    """Refuses every request; `locked://`."""

    protocol = "locked"

    def ls(self, path, detail=True, **kwargs):
        raise NoCredentialsError("Unable to locate credentials")

    def _open(self, path, mode="rb", **kwargs):
        raise NoCredentialsError("Unable to locate credentials")


class Listed(Locked):
    """Lists the files of a model and of an adapter, and refuses to read them; `listed://`."""

    protocol = "listed"

    def ls(self, path, detail=True, **kwargs):
        names = ("config.json", "adapter_config.json")
        return [{"name": f"{path}/{name}", "type": "file", "size": 2} for name in names]


for kind in (Locked, Listed):
    fsspec.register_implementation(kind.protocol, kind, clobber=True)
