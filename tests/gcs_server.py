"""A storage that speaks Google's JSON API in this process, as much of it as pyarrow's client asks for."""

import json
import re

from s3_server import Answer, ObjectServer

_PATH = re.compile(r"(?:upload/)?storage/v1/b/([^/]+)/o/?(.*)")


class GcsServer(ObjectServer):
    """An object is begun by one request and is there with the last of its bytes."""

    marks = frozenset({"uploadType", "upload_id", "alt", "prefix"})

    def address(self, path: str) -> str:
        where = f"scheme=http&endpoint_override=127.0.0.1%3A{self.port}"
        return f"gs://anonymous@{path}?{where}&retry_limit_seconds=0.5"

    def serve(self, asked: str, path: str, query: dict[str, str], body: bytes, span: str) -> Answer:
        found = _PATH.fullmatch(path)
        if found is None or found[1] not in self.objects:
            return _error(404)
        bucket, name = found[1], found[2] or query.get("name", "")
        whole = f"{bucket}/{name}"
        match asked:
            case "POST uploadType":
                self.uploads[number := str(len(self.asked))] = {}
                place = f"http://127.0.0.1:{self.port}/upload/storage/v1/b/{bucket}/o?name={name}&upload_id={number}"
                return 200, "{}", {"Location": place}
            case "PUT upload_id":
                return self._take(whole, query["upload_id"], body, span)
            case "GET alt":
                return (200, self.objects[whole], {}) if whole in self.objects else _error(404)
            case "GET prefix":
                return self._listing(bucket, query)
            case "DELETE":
                return (204, "", {}) if self.objects.pop(whole, None) is not None else _error(404)
            case "GET":
                return self._about(whole) if whole in self.objects else _error(404)
        raise AssertionError(asked)

    def _take(self, whole: str, upload: str, body: bytes, span: str) -> Answer:
        """Some bytes of an object, or none: then it is asked how many have come."""
        if upload not in self.uploads:  # it is complete
            return self._about(whole)
        parts = self.uploads[upload]
        if first := re.match(r"bytes (\d+)-", span):
            parts[int(first[1])] = body
        content = b"".join(part for _, part in sorted(parts.items()))
        if span.endswith(f"/{len(content)}"):
            self.objects[whole] = content
            del self.uploads[upload]
            return self._about(whole)
        return 308, "", {"Range": f"bytes=0-{len(content) - 1}"} if content else {}

    def _about(self, whole: str) -> Answer:
        return 200, json.dumps(self._row(whole)), {}

    def _row(self, whole: str) -> dict[str, str]:
        bucket, _, name = whole.partition("/")
        size = str(len(self.objects[whole]))
        return {"kind": "storage#object", "bucket": bucket, "name": name, "size": size, "generation": "1"}

    def _listing(self, bucket: str, query: dict[str, str]) -> Answer:
        """A page of a bucket's objects, in order, and of the folders beside them, that begin as asked."""
        begin, after = f"{bucket}/{query['prefix']}", f"{bucket}/{query.get('pageToken', '')}"
        found = sorted(path for path in self.objects if path.startswith(begin) and path > after and "/" in path)
        page = found[: self.page]
        here = [path for path in page if "/" not in path.removeprefix(begin) or "delimiter" not in query]
        below = {path.removeprefix(begin).partition("/")[0] for path in set(page) - set(here)}
        names = sorted(f"{query['prefix']}{folder}/" for folder in below)
        answer = {"kind": "storage#objects", "items": [self._row(path) for path in here], "prefixes": names}
        if len(page) < len(found):
            answer["nextPageToken"] = page[-1].removeprefix(f"{bucket}/")
        return 200, json.dumps(answer), {}


def _error(code: int) -> Answer:
    return code, json.dumps({"error": {"code": code, "message": "no such object"}}), {}
