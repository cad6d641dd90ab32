"""The documentation: it builds without a warning and without anything from elsewhere, and what it takes from code is
what the code says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from docs.site import http_words, write
from docs.site.endpoints import ENDPOINTS
from planner.errors import RaycombError
from protos.openai_body import Body
from tests.http_desk import desk
from tests.test_openai_schema import LEAST, every_error

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@pytest.mark.parametrize("name", write.PAGES)
def test_pages_out_of_code_are_fresh(name: str) -> None:
    fresh = write.PAGES[name]()
    assert (DOCS / name).read_text() == fresh, f"docs/{name} is stale: run `python -m docs.site.write`"


def test_every_field_has_its_words_and_no_words_are_left_over() -> None:
    fields = {name for one in ENDPOINTS for body in one.bodies for name in body.model_fields}
    assert fields == set(http_words.FIELDS), "docs/site/http_words.py says what fields do"
    of_bodies = {(body.__name__, name) for one in ENDPOINTS for body in one.bodies for name in body.model_fields}
    assert set(http_words.OF_ONE_BODY) <= of_bodies


@pytest.mark.parametrize("kind", LEAST, ids=lambda kind: kind.__name__)
def test_the_openapi_document_takes_what_the_service_takes(kind: type[Body]) -> None:
    document = json.loads((DOCS / "openapi.json").read_text())
    schema = {"$ref": f"#/components/schemas/{kind.__name__}", "components": document["components"]}
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert list(validator.iter_errors(LEAST[kind])) == []
    assert list(validator.iter_errors({**LEAST[kind], "no_such_field": 1})) != []


async def test_the_reference_has_every_endpoint_of_the_application() -> None:
    async with desk() as d:
        routes = {
            (method, route.path.replace(":path", ""))
            for route in d.app.routes
            for method in route.methods - {"HEAD"}
            if not route.path.startswith("/page/")
        }
    assert {(one.method, one.path) for one in ENDPOINTS} == routes


def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", "docs/site/mkdocs.yml", "-d", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    pages = sorted(tmp_path.rglob("*.html"))
    assert len(pages) >= 19
    for page in pages:
        text = page.read_text()
        assert loaded(text) == [], page.name
    (search,) = tmp_path.glob("search/search_index.json")
    assert "selector" in search.read_text()


def loaded(html: str) -> list[str]:
    """Addresses elsewhere that a browser would fetch by itself."""
    tags = re.findall(r"<(?:script|img|iframe|link)\b[^>]*>", html)
    fetching = [tag for tag in tags if 'rel="canonical"' not in tag]
    return re.findall(r'(?:src|href)="?((?:https?:)?//[^"\s>]+)', " ".join(fetching))


def test_the_check_of_what_is_loaded_sees_a_script_from_elsewhere() -> None:
    assert loaded('<p><script async src="https://cdn.example/x.js"></script>') == ["https://cdn.example/x.js"]
    assert loaded('<a href="https://example.com">away</a><link rel="stylesheet" href="//x.example/y.css">') == [
        "//x.example/y.css"
    ]


def test_troubleshooting_knows_codes_and_messages_that_exist() -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    codes = {error.code for error in every_error(RaycombError)}
    told = set(re.findall(r"^\| \d{3} `(\w+)`", text, re.M))
    assert len(told) >= 7
    assert told <= codes
    start = text.partition("## It does not start")[2].partition("##")[0]
    source = "\n".join(path.read_text() for path in [*ROOT.glob("cluster/**/*.py"), *ROOT.glob("worker/**/*.py")])
    for message in re.findall(r"^\| `([^`]+)`", start, re.M):
        for part in re.split(r"\.\.\.|\d[\d.:]*", message):
            assert part.strip() in source, message


async def test_the_service_gives_its_document_to_everybody() -> None:
    async with desk(api_keys=("k",)) as d:
        answer = await d.http.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    assert answer.text == write.PAGES["openapi.json"]()
