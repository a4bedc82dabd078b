"""A small HTTP server on the loopback interface with scripted answers."""

import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@contextmanager
def serving(replies, *, host="127.0.0.1", token=None):
    """Serve `replies` (path to JSON or text) and yield the URL and the headers that came in.

    With a token, paths that do not begin with "/api/authentication" answer 401 without it.
    """
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append(dict(self.headers))
            is_known = self.headers.get("Authorization") == f"Bearer {token}"
            if token and not is_known and not self.path.startswith("/api/authentication"):
                self.answer(401, "Unauthorized: Missing authentication token")
            elif self.path in replies:
                reply = replies[self.path]
                self.answer(200, reply if isinstance(reply, str) else json.dumps(reply))
            else:
                self.answer(404, "")

        def answer(self, status, text):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args):
            """Keep the terminal clean."""

    server = ThreadingHTTPServer((host, 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://{host}:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
