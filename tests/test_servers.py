"""Distillation by OpenAI-compatible servers: here one of this process, whose answers are a tiny target's own. Rows are those of the
in-process engine, whatever the servers do meanwhile, and what was answered once is not asked again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import tiny
from draftheads.data import servers as module
from draftheads.data.distill import distill
from draftheads.inference.decode import complete
from draftheads.inference.drafters.none import NoDrafter
from draftheads.inference.requests import Limits, Request
from draftheads.inference.target import Target
from draftheads.recipes.schema import Recipe, RecipeError

WORDS = "tell me about the sea and what fish eat when winter comes over cold dark water".split()
OLD = {"role": "assistant", "content": "OLD"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder):
    return Target.load(str(folder), dtype="float32", device="cpu", packed=False)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(module, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(module, "LONGEST_WAIT_S", 0.05)


class Server:
    """reply(server, body, key) -> (status, JSON) instead of the target's answer, or None. asked: bodies, in order."""

    def __init__(self, target, reply=None, *, ids=True, extras=True, model="tiny", room=512, delay=0.0):
        self.target, self.reply, self.ids, self.extras, self.model, self.room, self.delay = target, reply, ids, extras, model, room, delay
        self.asked, self.keys, self.lock = [], [], threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def do_GET(self):
                if self.path == "/v1/models":
                    self.send(200, {"data": [{"id": server.model, "max_model_len": server.room}]})
                else:
                    self.send(404, {"detail": "Not Found"})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.lock:
                    server.asked.append(body)
                    server.keys.append(self.headers.get("Authorization"))
                    count = len(server.asked)
                found = server.reply(server, body, count) if server.reply else None
                if found == "hang up":
                    self.connection.close()
                    return
                self.send(*(found or (200, server.answer(body))))

            def send(self, status, value):
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    def answer(self, body):
        if not self.extras and "return_token_ids" in body:
            return {"error": {"message": "extra fields not permitted"}}
        time.sleep(self.delay)
        with self.lock:
            done = complete(self.target, NoDrafter(), [Request("x", tuple(body["prompt"]))], limits=Limits(body["max_tokens"], 512))[0]
        choice = {"text": self.target.tokenizer.decode(done.tokens, skip_special_tokens=True),
                  "finish_reason": "stop" if done.finish_reason == "eos" else "length", "logprobs": None}
        if body.get("logprobs"):
            choice["logprobs"] = {"token_logprobs": [-0.5] * len(done.tokens)}
        if self.ids and body.get("return_token_ids"):
            choice |= {"token_ids": done.tokens, "prompt_token_ids": body["prompt"]}
        return {"choices": [choice]}

    def close(self):
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def serve(target):
    made = []

    def start(*args, **options):
        made.append(Server(target, *args, **options))
        return made[-1]

    yield start
    for server in made:
        server.close()


def records(count=10):
    for i in range(count):
        text = " ".join(WORDS[i % 7 : i % 7 + 2 + i % 4]) + f" {i}"
        yield {"id": f"p{i}", "category": "ab"[i % 2], "messages": [{"role": "user", "content": text}]}
    yield {"id": "talk", "messages": [{"role": "user", "content": "one"}, OLD, {"role": "user", "content": "two"}, OLD,
                                      {"role": "user", "content": "three"}]}


def recipe_of(place, folder, servers, given=None, **data):
    place.mkdir(parents=True, exist_ok=True)
    (place / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (records() if given is None else given)))
    served = {} if servers is None else {"servers": {"urls": [s if isinstance(s, str) else s.url for s in servers], "retries": 3, "timeout_s": 20}
                                         | data.pop("options", {})}
    data = dict(prompts=str(place / "prompts.jsonl"), max_new_tokens=10, batch_size=3, shard_rows=4, max_prompt_tokens=200, drop_loops=False,
                features="online") | served | data
    return Recipe.model_validate({"run": str(place / "run"), "target": {"name": str(folder), "dtype": "float32"}, "data": data,
                                  "head": {"type": "eagle3", "taps": [1, 2, 3]}})


def rows(store):
    return {r.id: (r.ids.tolist(), r.flags.tolist(), r.finish_reason, r.category, r.seed) for r in store}


@pytest.fixture(scope="module")
def in_process(tmp_path_factory, folder, target):
    return rows(distill(recipe_of(tmp_path_factory.mktemp("here"), folder, None), target=target, progress=False))


@pytest.mark.parametrize("count", [1, 2])
def test_rows_are_those_of_the_in_process_engine(tmp_path, folder, serve, in_process, count):
    servers = [serve() for _ in range(count)]
    store = distill(recipe_of(tmp_path, folder, servers), progress=False)
    assert rows(store) == in_process
    assert len(in_process) == 13
    assert [r.id for r in store] == sorted((r.id for r in store), key=[r.id for r in store].index)
    assert sum(len(s.asked) for s in servers) == 13
    assert all(s.asked for s in servers)
    assert store.manifest["provenance"]["devices"] == ["servers"]
    # Finished: no server is needed to open it.
    for server in servers:
        server.close()
        server.http.shutdown = lambda: None
    assert rows(distill(recipe_of(tmp_path, folder, servers), progress=False)) == in_process


@pytest.mark.parametrize("kind", ["no ids", "no extras"])
def test_servers_that_return_text_only_are_tokenised_again_and_that_is_said(tmp_path, folder, serve, in_process, capsys, kind):
    def refuse(server, body, count):
        return (400, {"error": {"message": "return_token_ids: extra fields not permitted"}}) if "return_token_ids" in body else None

    server = serve(None if kind == "no ids" else refuse, ids=False)
    store = distill(recipe_of(tmp_path, folder, [server], options={"concurrency": 1}))
    for row in store:  # the tiny target writes many a special token, which text does not show: so they differ, and say so
        assert row.extra["exact"] is False
        prompt = [t for t, f in zip(*in_process[row.id][:2], strict=True) if not f]
        assert row.extra["turn"] > 1 or row.ids[: len(prompt)].tolist() == prompt
    assert store.counts["retokenised"] == len(store)
    assert "tokenised again" in capsys.readouterr().err
    assert len(server.asked) == len(store) + (kind == "no extras")  # refused once, then known


@pytest.mark.parametrize("failure", ["500", "429", "hang up", "garbage", "abort"])
def test_failures_that_pass_change_nothing(tmp_path, folder, serve, in_process, failure):
    def now_and_then(server, body, count):
        if count % 3 == 1:
            return {"500": (500, {"error": {"message": "oh"}}), "429": (429, {}), "hang up": "hang up", "garbage": (200, {"nothing": 1}),
                    "abort": (503, {})}[failure]
        return None

    assert rows(distill(recipe_of(tmp_path, folder, [serve(now_and_then), serve()]), progress=False)) == in_process


def test_an_absent_server_is_done_without(tmp_path, folder, serve, in_process):
    one, two = serve(lambda server, body, count: server.http.shutdown() or server.http.server_close() or "hang up" if count == 2 else None), serve()
    assert rows(distill(recipe_of(tmp_path, folder, [one, two], options={"concurrency": 2}), progress=False)) == in_process
    one.close = lambda: None


def test_a_prompt_that_fails_is_kept_apart_with_its_reason_and_asked_again_by_a_new_run(tmp_path, folder, serve):
    def poison(server, body, count):
        return (500, {"error": {"message": "CUDA\nerror"}}) if len(body["prompt"]) == poisoned else None

    lengths = {r["id"]: r for r in records()}
    poisoned = len(Target.load(str(folder), dtype="float32", device="cpu", packed=False).tokenizer.apply_chat_template(
        lengths["p3"]["messages"], add_generation_prompt=True)["input_ids"])
    store = distill(recipe_of(tmp_path, folder, [serve(poison)], options={"retries": 1}), progress=False)
    failed = [json.loads(line) for line in (tmp_path / "run" / "distill" / "failed.jsonl").read_text().splitlines()]
    assert "p3" in {f["id"] for f in failed}
    assert {f["error"] for f in failed} == {"500: CUDA error (2 tries)"}
    assert len(store) == 13 - len(failed)


def test_what_was_answered_is_not_asked_again_when_the_source_grows(tmp_path, folder, serve, in_process):
    server = serve()
    distill(recipe_of(tmp_path, folder, [server]), progress=False)
    asked = len(server.asked)
    more = [{"id": "new", "prompt": "what is new"}, *list(records())[::-1]]
    store = distill(recipe_of(tmp_path, folder, [server], more), progress=False)
    assert {k: v for k, v in rows(store).items() if k != "new"} == in_process
    assert len(server.asked) == asked + 1


CHILD = """
import sys
from draftheads.data.distill import distill
from draftheads.recipes.schema import Recipe
distill(Recipe.load(sys.argv[1]), progress=False)
"""


@pytest.mark.parametrize(("how", "moments"), [(signal.SIGKILL, (2, 6)), (signal.SIGINT, (4,))])
def test_a_kill_loses_nothing_that_was_answered(tmp_path, folder, serve, in_process, how, moments):
    server = serve(delay=0.02)
    recipe = recipe_of(tmp_path, folder, [server], options={"concurrency": 2})
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.model_dump_json())
    for wanted in moments:
        before = len(server.asked)
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 120
        while len(server.asked) - before < wanted and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        child.send_signal(how)
        child.wait()
        answers = tmp_path / "run" / "answers.jsonl"
        with answers.open("ab") as out:
            out.write(b'{"key": "cut sh')
    store = distill(recipe, progress=False)
    assert rows(store) == in_process
    assert len(server.asked) <= 13 + 2 * 2 * len(moments)  # but for those under way at a kill


def test_the_key_is_sent_and_never_written(tmp_path, folder, serve, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sesame")
    server = serve()
    distill(recipe_of(tmp_path, folder, [server], options={"api_key_env": "MY_KEY"}), progress=False)
    assert set(server.keys) == {"Bearer sesame"}
    assert not [p for p in (tmp_path / "run").rglob("*") if p.is_file() and b"sesame" in p.read_bytes()]


def test_log_probabilities_are_kept_where_they_are_asked_for(tmp_path, folder, serve):
    store = distill(recipe_of(tmp_path, folder, [serve()], options={"logprobs": True}), progress=False)
    for row in store:
        assert row.extra["logprobs"] == [-0.5] * int(row.flags.sum())


@pytest.mark.parametrize(("kind", "said"), [
    ("none", "no server answers at http://127.0.0.1:9/v1"), ("other", "serve different models .other, tiny.: name one"),
    ("unknown", "serves tiny: name one of them"), ("small", r"serves 100 tokens \(max_model_len\).*210"), ("strange", "URL ends with /v1"),
])
def test_a_server_that_is_not_as_it_should_be_is_found_before_any_work(tmp_path, folder, serve, kind, said):
    good = serve()
    servers = {"none": ["http://127.0.0.1:9/v1"], "other": [good, serve(model="other")], "unknown": [good], "small": [serve(room=100)],
               "strange": [good.url.removesuffix("/v1")]}[kind]
    options = {"model": "qwen"} if kind == "unknown" else {}
    with pytest.raises(RecipeError, match=said):
        distill(recipe_of(tmp_path, folder, servers, options=options), progress=False)
    assert not good.asked


def test_servers_that_all_stay_away_end_the_run_and_it_can_be_resumed(tmp_path, folder, serve, in_process):
    down = [True]
    server = serve(lambda server, body, count: (503, {}) if down[0] and count > 3 else None)
    recipe = recipe_of(tmp_path, folder, [server], options={"patience_s": 0.5, "concurrency": 1})
    with pytest.raises(RecipeError, match="no server has answered for 0.5 s.*run the same command again"):
        distill(recipe, progress=False)
    down[0] = False
    assert rows(distill(recipe, progress=False)) == in_process


def test_when_all_fail_the_run_stops(tmp_path, folder, serve, monkeypatch):
    from draftheads.data import remote

    monkeypatch.setattr(remote, "FIRST", 4)
    with pytest.raises(RecipeError, match="4 of the first 4 prompts failed, the last with: 404: no such route"):
        distill(recipe_of(tmp_path, folder, [serve(lambda *_: (404, {"detail": "no such route"}))]), progress=False)


def test_states_are_not_to_be_had_from_servers(tmp_path, folder):
    with pytest.raises(ValueError, match="set data.features: online"):
        recipe_of(tmp_path, folder, ["http://x/v1"], features="capture")
