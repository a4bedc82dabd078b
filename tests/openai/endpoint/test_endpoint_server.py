"""The server of the tests leaves nothing behind that would fail another test."""

import gc
import socket
import threading
import warnings
from contextlib import ExitStack
from urllib.parse import urlsplit

from tests.openai.endpoint.endpoint_server import EndpointServer


def test_connections_that_come_while_the_server_ends_are_closed():
    is_held, may_go_on = threading.Event(), threading.Event()

    def hold():
        is_held.set()
        may_go_on.wait(20)

    gc.collect()  # what other tests have left
    with ExitStack() as clients, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with EndpointServer() as server:
            url = urlsplit(server.url)
            server._loop.call_soon_threadsafe(hold)
            assert is_held.wait(20)
            for _ in range(3):
                clients.enter_context(socket.create_connection((url.hostname, url.port)))
            # the end is asked for before the loop has seen who came
            threading.Timer(0.1, may_go_on.set).start()
        del server
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
