"""Takes webhooks: verifies them and counts each event once.

    DATABASE_URL=… WEBHOOK_SECRET=whsec_… PORT=8080 python3 receiver.py

The check of the signature is ten lines of the standard library; the package
standardwebhooks does the same.
"""

import base64
import hashlib
import hmac
import os
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psycopg

DATABASE_URL = os.environ["DATABASE_URL"]
KEY = base64.b64decode(os.environ["WEBHOOK_SECRET"].removeprefix("whsec_"))
LONGEST = 1 << 20


def genuine(headers, body):
    """Tells whether the body is what the sender signed in the last five minutes."""
    message_id, sent_at = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    if not sent_at.isdecimal() or abs(time.time() - int(sent_at)) > 300:
        return False
    signed = f"{message_id}.{sent_at}.".encode() + body
    expected = base64.b64encode(hmac.digest(KEY, signed, hashlib.sha256)).decode()
    return any(
        hmac.compare_digest(f"v1,{expected}".encode(), candidate.encode())
        for candidate in headers.get("webhook-signature", "").split(" ")
    )


def handle(message_id, body):
    """Does the work once for each id: the id and the work commit together."""
    with psycopg.connect(DATABASE_URL) as connection:
        seen = connection.execute(
            "insert into webhook_seen (id) values (%s) on conflict (id) do nothing", (message_id,)
        )
        if seen.rowcount == 1:  # else a duplicate: it was handled, so say yes again
            connection.execute(
                "insert into received (event, body) values (%s, %s)", (message_id, body.decode())
            )


class Hooks(BaseHTTPRequestHandler):
    def do_POST(self):
        length = int(self.headers.get("content-length") or 0)
        if self.path != "/hooks" or length > LONGEST:
            self.answer(404 if self.path != "/hooks" else 413)
            return
        # The signature is over these bytes: read them before anything parses.
        body = self.rfile.read(length)
        if not genuine(self.headers, body):
            self.answer(401)
            return
        try:
            handle(self.headers["webhook-id"], body)
            self.answer(204)
        except psycopg.Error as error:
            print(error, flush=True)
            self.answer(500)  # it will be tried again

    def answer(self, status):
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args):
        """Says nothing about requests that went well."""


with psycopg.connect(DATABASE_URL) as connection:
    connection.execute(
        """create table if not exists webhook_seen (id text primary key);
           create table if not exists received (
             id bigint generated always as identity, event text not null, body text not null)"""
    )

server = ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Hooks)
print(f"listening on http://127.0.0.1:{server.server_port}/hooks", flush=True)
server.serve_forever()
