"""The scripted agent itself: an ACP program that plays a file of actions.

It is uploaded into the sandbox and started there with ``python3``, so it is one file, needs
nothing beyond the standard library and runs on Python 3.7. Argument: the script, as JSON
(``benchflow.agents.scripted.script`` checks it and says what the actions mean).
"""

import http.client
import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
import urllib.parse


class Over(Exception):
    """The turn ends: its stop reason, or the JSON-RPC error that answers the request."""


class Wire:
    """Frames on stdin and stdout."""

    def __init__(self):
        self.lock = threading.Lock()
        self.replies = {}
        self.next_id = 0

    def write(self, data):
        with self.lock:
            view = memoryview(data)
            while view:
                view = view[os.write(1, view) :]

    def frame(self, message):
        self.write(json.dumps(message).encode() + b"\n")

    def send(self, message):
        self.frame(dict(message, jsonrpc="2.0"))

    def update(self, session, update):
        self.send({"method": "session/update", "params": {"sessionId": session, "update": update}})

    def request(self, method, params):
        """Send a request and return the queue its reply will arrive in."""
        self.next_id += 1
        box = self.replies[f"agent-{self.next_id}"] = queue.Queue()
        self.send({"id": f"agent-{self.next_id}", "method": method, "params": params})
        return box


class Turn:
    """One prompt being played."""

    def __init__(self, agent, wire, session, request_id, prompt):
        self.agent = agent
        self.wire = wire
        self.session = session
        self.request_id = request_id
        self.prompt = prompt
        self.cancel = threading.Event()
        self.heeds_cancel = True
        self.usage = None

    def play(self, actions):
        end = "end_turn"
        try:
            self.run(actions)
        except Over as over:
            end = over.args[0]
        except Exception as fault:  # whatever went wrong, the client must not wait for ever
            end = {"code": -32603, "message": f"{type(fault).__name__}: {fault}"}
        self.reply(end)

    def reply(self, end):
        if self.request_id is None:
            return
        message = {"id": self.request_id}
        if isinstance(end, dict):
            message["error"] = end
        else:
            message["result"] = {"stopReason": end}
            if self.usage:
                message["result"]["usage"] = self.usage
        self.request_id = None
        self.wire.send(message)

    def run(self, actions):
        for action in actions:
            if self.cancel.is_set() and self.heeds_cancel:
                raise Over("cancelled")
            ((name, value),) = action.items()
            getattr(self, "do_" + name)(value)

    def update(self, name, **fields):
        self.wire.update(self.session, dict(fields, sessionUpdate=name))

    def text(self, kind, text):
        self.update(kind, content={"type": "text", "text": text})

    # ── what an honest agent does ───────────────────────────────────────────────────────────

    def do_say(self, text):
        self.text("agent_message_chunk", text)

    def do_think(self, text):
        self.text("agent_thought_chunk", text)

    def do_plan(self, entries):
        rows = [{"content": entry, "priority": "medium", "status": "pending"} for entry in entries]
        self.update("plan", entries=rows)

    def do_usage(self, usage):
        self.update("usage_update", **usage)

    def do_reply_usage(self, usage):
        self.usage = usage

    def do_run(self, what):
        call = self.call(what["title"], "execute", {"command": what["command"]})
        argv = ["/bin/sh", "-c", what["command"]]
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        output, code = done.stdout.decode("utf-8", "replace"), done.returncode
        self.finish(call, code == 0, {"output": output, "metadata": {"exit": code}}, output)

    def do_write(self, what):
        call = self.call("write " + what["path"], "edit", what)
        folder = os.path.dirname(what["path"])
        try:
            if folder:
                os.makedirs(folder, exist_ok=True)
            with open(what["path"], "w", encoding="utf-8") as handle:
                handle.write(what["content"])
            self.finish(call, True, None, "wrote " + what["path"])
        except OSError as error:
            self.finish(call, False, None, str(error))

    def do_ask(self, what):
        call = self.agent.new_call()
        params = {
            "sessionId": self.session,
            "toolCall": {"toolCallId": call, "title": what["question"], "status": "pending"},
            "options": what["options"],
        }
        box = self.wire.request("session/request_permission", params)
        outcome = (box.get().get("result") or {}).get("outcome") or {}
        chosen = outcome.get("optionId", "cancelled")
        self.run(what["then"].get(chosen, []))

    def do_model(self, what):
        """One chat completion through the gateway, said as a message."""
        base = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
        connection = http.client.HTTPConnection(base.netloc, timeout=600)
        question = {"role": "user", "content": what.get("prompt") or self.prompt}
        body = {"model": os.environ["OPENAI_MODEL"], "messages": [question]}
        key = "Bearer " + os.environ["OPENAI_API_KEY"]
        headers = {"Content-Type": "application/json", "Authorization": key}
        connection.request("POST", base.path + "/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        raw = response.read().decode("utf-8", "replace")
        if response.status != 200:
            raise Over({"code": -32603, "message": f"the model answered {response.status}: {raw[:500]}"})
        self.do_say(json.loads(raw)["choices"][0]["message"].get("content") or "")

    def do_choose(self, branches):
        weights = [branch["weight"] for branch in branches]
        self.run(self.agent.random.choices(branches, weights)[0]["actions"])

    def do_save_prompt(self, path):
        with open(path, "wb") as handle:
            handle.write(self.prompt.encode("utf-8", "surrogatepass"))

    def do_sleep(self, seconds):
        if self.cancel.wait(seconds) and self.heeds_cancel:
            raise Over("cancelled")

    def do_end(self, reason):
        raise Over(reason)

    def do_late(self, actions):
        """Answer the prompt now, then go on with ``actions``."""
        self.reply("end_turn")
        self.run(actions)

    # ── what a broken one does ──────────────────────────────────────────────────────────────

    def do_on_cancel(self, what):
        self.heeds_cancel = what == "stop"

    def do_hang(self, _):
        while True:
            self.do_sleep(3600)

    def do_stream(self, what):
        """Say the same thing again and again, until cancelled or ``times`` is reached."""
        count = 0
        while what.get("times") is None or count < what["times"]:
            self.do_say(what["text"])
            self.do_sleep(what.get("every", 0.01))
            count += 1

    def do_crash(self, code):
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)

    def do_fail(self, error):
        raise Over(error)

    def do_raw(self, text):
        self.wire.write(text.encode("utf-8", "surrogateescape"))

    def do_raw_hex(self, digits):
        """Each item is one write, so that a character can be split between two of them."""
        for part in digits:
            self.wire.write(bytes.fromhex(part))

    def do_send(self, message):
        self.wire.frame(message)

    def do_big(self, size):
        """One frame of exactly ``size`` bytes, its newline included."""
        update = {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": ""}}
        params = {"sessionId": self.session, "update": update}
        frame = {"jsonrpc": "2.0", "method": "session/update", "params": params}
        missing = size - len(json.dumps(frame)) - 1
        update["content"]["text"] = "x" * max(missing, 0)
        self.wire.frame(frame)

    def do_stderr(self, what):
        for _ in range(what.get("times", 1)):
            os.write(2, what["text"].encode())

    def do_close_stdout(self, _):
        os.close(1)

    def call(self, title, kind, raw_input):
        call = self.agent.new_call()
        self.update(
            "tool_call", toolCallId=call, title=title, kind=kind, status="in_progress", rawInput=raw_input
        )
        return call

    def finish(self, call, good, raw_output, text):
        fields = {"toolCallId": call, "status": "completed" if good else "failed"}
        if raw_output is not None:
            fields["rawOutput"] = raw_output
        fields["content"] = [{"type": "content", "content": {"type": "text", "text": text}}]
        self.update("tool_call_update", **fields)


class Agent:
    """Answers the client's requests; turns are played in a thread of their own."""

    def __init__(self, script):
        self.script = script
        self.random = random.Random(script["seed"])
        self.wire = Wire()
        self.turns = {}
        self.calls = 0

    def new_call(self):
        self.calls += 1
        return f"call-{os.getpid()}-{self.calls}"

    def serve(self):
        for line in sys.stdin.buffer:
            message = json.loads(line.decode("utf-8"))
            if "method" not in message:
                box = self.wire.replies.pop(message["id"], None)
                if box is not None:
                    box.put(message)
            else:
                self.handle(message["method"], message.get("params") or {}, message.get("id"))

    def handle(self, method, params, request_id):
        if method == "session/prompt":
            self.start_turn(params, request_id)
        elif method == "session/cancel":
            turn = self.turns.get(params["sessionId"])
            if turn is not None:
                turn.cancel.set()
        elif request_id is not None:
            answer = getattr(self, "on_" + method.replace("/", "_"), None)
            if answer is None:
                error = {"code": -32601, "message": "no method " + method}
                self.wire.send({"id": request_id, "error": error})
            else:
                self.wire.send({"id": request_id, "result": answer(params)})

    def on_initialize(self, params):
        handshake = self.script.get("handshake", {})
        if "actions" in handshake:
            Turn(self, self.wire, "", None, "").run(handshake["actions"])
        return {
            "protocolVersion": handshake.get("version", 1),
            "agentInfo": {"name": "scripted", "version": "1"},
            "agentCapabilities": {"loadSession": True},
        }

    def on_session_new(self, params):
        session = f"scripted-{os.getpid()}-{time.time_ns()}"
        self.remember(session, 0)
        return {"sessionId": session}

    def on_session_load(self, params):
        self.recall(params["sessionId"])
        Turn(self, self.wire, params["sessionId"], None, "").do_say("(replayed)")
        return {}

    def on_session_set_mode(self, params):
        return {}

    def on_session_set_config_option(self, params):
        return {"configOptions": []}

    def start_turn(self, params, request_id):
        session = params["sessionId"]
        prompt = "".join(block.get("text", "") for block in params["prompt"])
        played = self.recall(session)
        self.remember(session, played + 1)
        turns = self.script["turns"]
        actions = turns[played] if played < len(turns) else turns[-1] if self.script["repeat"] else []
        turn = self.turns[session] = Turn(self, self.wire, session, request_id, prompt)
        threading.Thread(target=turn.play, args=(actions,), daemon=True).start()

    def remember(self, session, played):
        """How far a session got is kept under HOME, so that it can be loaded by a new process."""
        os.makedirs(self.state(), exist_ok=True)
        with open(os.path.join(self.state(), session), "w") as handle:
            handle.write(str(played))

    def recall(self, session):
        with open(os.path.join(self.state(), os.path.basename(session))) as handle:
            return int(handle.read())

    def state(self):
        return os.path.join(os.path.expanduser("~"), ".scripted", "sessions")


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as handle:
        Agent(json.load(handle)).serve()
