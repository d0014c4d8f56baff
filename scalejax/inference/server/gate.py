"""Which requests reach the routes: those to a name of this server, from no page of another site, of one length.

A browser sends what any page asks of it, to 127.0.0.1 too. A page of a name whose address its owner changes to that of
this server (DNS rebinding) counts as of the same site; its `Host` is that name, and betrays it.
"""

import dataclasses
import ipaddress
import socket
import urllib.parse
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from scalejax.errors import UserError
from scalejax.inference.server.protocol import ApiError, show

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_EVERY_ADDRESS = ("0.0.0.0", "::")


@dataclasses.dataclass(frozen=True)
class Origins:
    """Whom a server knows.

    Attributes:
      host: Where it listens.
      allowed: Further origins, such as https://chat.example.org, whose pages may ask. Their names are names of it too.
    """

    host: str = "127.0.0.1"
    allowed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for origin in self.allowed:
            parts = urllib.parse.urlsplit(origin)
            if not parts.scheme or not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}".lower():
                raise UserError(
                    "--allow-origin must be a scheme and a name in small letters, with a port if there is one, such as "
                    f"https://chat.example.org; got {origin!r}."
                )

    def check(self, headers: Headers) -> None:
        """Refuses a request to another name, or from a page of another site.

        Raises:
          ApiError: with status 403.
        """
        host = headers.get("host")
        if host is not None and not self._is_own(f"//{host}"):  # HTTP/1.0 has none, and no browser sends it
            raise ApiError(
                f"Host {show(host)} is no name of this server. If it is one, start it with --allow-origin http://NAME.",
                status=403,
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is not None and origin not in self.allowed and not self._is_own(origin):
            raise ApiError(
                f"pages of {show(origin)} may not ask this server. If they may, start it with --allow-origin.",
                status=403,
                code="origin_not_allowed",
            )

    def _is_own(self, url: str) -> bool:
        try:
            name = urllib.parse.urlsplit(url).hostname
        except ValueError:
            return False
        if name is None:
            return False
        names = {*LOOPBACK, self.host.lower(), *(urllib.parse.urlsplit(each).hostname for each in self.allowed)}
        if name in names:
            return True
        # By an address, or by the name of the machine, nobody is led here who did not mean to be.
        return self.host in _EVERY_ADDRESS and (name == socket.gethostname().lower() or _is_address(name))


class Gate:
    """The application in front of another, which answers what may not reach that one.

    Args:
      app: What answers the others.
      origins: Whom the server knows.
      refuse: Makes the answer to a refusal.
    """

    def __init__(self, app: ASGIApp, origins: Origins, refuse: Callable[[ApiError], Response]) -> None:
        self._app, self._origins, self._refuse = app, origins, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the beginning and the end of the application
            await self._app(scope, receive, send)
            return
        try:
            headers = Headers(scope=scope)
            self._origins.check(headers)
            if "content-length" in headers and "transfer-encoding" in headers:
                # A proxy may have gone by the other one, and take the rest of the body for the next request.
                raise ApiError("a body has either Content-Length or Transfer-Encoding; got both.", code="two_lengths")
        except ApiError as error:
            refusal = self._refuse(error)
            refusal.headers["connection"] = "close"  # whatever follows is no request of its own
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
