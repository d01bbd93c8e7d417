"""A storage that speaks S3 in this process, as much of it as pyarrow's client asks for: objects in memory, by path.

It goes away and comes back as a test says; what is under way then fails as on a network that breaks."""

import re
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase, BytesIO
from socket import SHUT_RDWR, socket
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

KEYS = {"AWS_ACCESS_KEY_ID": "hush-id", "AWS_SECRET_ACCESS_KEY": "hush-key", "AWS_EC2_METADATA_DISABLED": "true"}
"""Of its clients' environment: they ask nobody else who they are."""
Answer = tuple[int, str | bytes, dict[str, str]]


class ObjectServer:
    """What any such storage has. It keeps its port while it is away."""

    marks = frozenset[str]()
    """What a request may ask for besides an object."""

    def __init__(self) -> None:
        self.objects = {"bucket": b""}
        self.uploads = dict[str, dict[int, bytes]]()  # parts of objects that are not complete
        self.asked = list[str]()  # methods of requests that came, and what they ask for besides an object
        self.lost = self.unheard = ""
        """Patterns of requests that do not arrive, and of those that do, but whose answers do not."""
        self.page = 1000  # most objects that one answer lists
        self.answers = threading.Event()  # unless it is set, nothing is done, nor answered
        self.answers.set()
        self.port, self._running = 0, list[_Server]()
        self.come_back()

    def come_back(self) -> None:
        server = _Server(("127.0.0.1", self.port), _Request)
        server.storage, self.port = self, server.server_port
        self._running.append(server)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def go_away(self) -> None:
        """Connections are refused, and those that were open are cut; so it ends."""
        for server in self._running:
            server.shutdown()
            for connection in server.connections:
                with suppress(OSError):
                    connection.shutdown(SHUT_RDWR)
            server.server_close()
        self._running.clear()

    def serve(self, asked: str, path: str, query: dict[str, str], body: bytes, span: str) -> Answer:
        """Code, content and headers; `span`: which bytes of an object this is."""
        raise NotImplementedError


class S3Server(ObjectServer):
    marks = frozenset({"uploads", "uploadId", "list-type"})

    def address(self, path: str) -> str:
        return f"s3://{path}?scheme=http&endpoint_override=127.0.0.1:{self.port}&region=us-east-1"

    def serve(self, asked: str, path: str, query: dict[str, str], body: bytes, span: str) -> Answer:
        return *_serve(self, asked, path, query, body), {"ETag": '"0"'}


class _Server(ThreadingHTTPServer):
    storage: ObjectServer

    def __init__(self, *about: Any):
        super().__init__(*about)
        self.connections = list[socket]()

    def get_request(self) -> tuple[socket, Any]:
        connection, address = super().get_request()
        self.connections.append(connection)
        return connection, address

    def handle_error(self, *about: object) -> None:
        """Of a connection that is cut."""


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def _answer(self) -> None:
        storage, address = self.server.storage, urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(address.query, keep_blank_values=True).items()}
        asked = " ".join([self.command, *sorted(storage.marks & query.keys())])
        storage.asked.append(asked)
        body = self._body()
        storage.answers.wait()
        if re.fullmatch(storage.lost, asked):
            raise ConnectionError
        span = self.headers.get("Content-Range", "")
        code, found, headers = storage.serve(asked, unquote(address.path).lstrip("/"), query, body, span)
        if re.fullmatch(storage.unheard, asked):
            raise ConnectionError
        content = found.encode() if isinstance(found, str) else found
        if part := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            code, content = 206, content[int(part[1]) : int(part[2]) + 1]
        self.send_response(code)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = _joined(self.rfile)
        return _joined(BytesIO(body)) if self.headers.get("Content-Encoding") == "aws-chunked" else body

    def log_message(self, *about: object) -> None:
        pass


def _joined(chunks: BufferedIOBase) -> bytes:
    """Raises ValueError if they end too soon."""
    body = b""
    while size := int(chunks.readline(), 16):
        body += chunks.read(size)
        chunks.readline()
    while chunks.readline().strip():
        pass
    return body


def _serve(storage: S3Server, asked: str, path: str, query: dict[str, str], body: bytes) -> tuple[int, str | bytes]:
    objects, uploads, upload = storage.objects, storage.uploads, query.get("uploadId", "")
    match asked:
        case "POST uploads":
            uploads[name := str(len(storage.asked))] = {}
            return 200, f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>"
        case "PUT uploadId":
            uploads[upload][int(query["partNumber"])] = body
        case "POST uploadId":
            objects[path] = b"".join(part for _, part in sorted(uploads.pop(upload).items()))
            return 200, '<CompleteMultipartUploadResult><ETag>"0"</ETag></CompleteMultipartUploadResult>'
        case "PUT":
            objects[path] = body
        case "DELETE":
            objects.pop(path, None)
        case "GET list-type":
            return 200, _listing(storage, path.strip("/"), query)
        case _:
            return (200, objects[path]) if path in objects else (404, "<Error><Code>NoSuchKey</Code></Error>")
    return 200, ""


def _listing(storage: S3Server, bucket: str, query: dict[str, str]) -> str:
    """A page of a bucket's objects, in order, that begin as asked."""
    begin, after = f"{bucket}/{query.get('prefix', '')}", f"{bucket}/{query.get('continuation-token', '')}"
    found = sorted(path for path in storage.objects if path.startswith(begin) and path > after)
    page = [path.removeprefix(f"{bucket}/") for path in found[: storage.page]]
    rows = "".join(f"<Contents><Key>{escape(key)}</Key><Size>1</Size></Contents>" for key in page)
    if is_cut := len(page) < len(found):
        rows += f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
    return f"<ListBucketResult><IsTruncated>{str(is_cut).lower()}</IsTruncated>{rows}</ListBucketResult>"
