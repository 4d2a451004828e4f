"""A page in Debian's Chromium, without a window, by its DevTools protocol."""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
import urllib.request

CHROMIUM = shutil.which("chromium")


class Browser:
    """The one page of a Chromium; `errors`: what its console said that is no mere remark."""

    def __init__(self, socket):
        self.socket, self.numbers, self.errors, self.requests = socket, itertools.count(1), [], []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters}
        self.socket.send(json.dumps(message))
        while True:
            said = json.loads(self.socket.recv(timeout=30))
            if said.get("id") == number:
                assert "error" not in said, said
                return said["result"]
            self.note(said)

    def note(self, event):
        parameters = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            self.errors.append(parameters["exceptionDetails"]["exception"]["description"])
        if event["method"] == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])
        if event["method"] == "Runtime.consoleAPICalled" and parameters["type"] == "error":
            self.errors.append(str(parameters["args"]))
        if event["method"] == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def open(self, path, width=1280, height=900, scheme="light"):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + 30
        while self.ask("document.readyState") != "complete":
            assert time.monotonic() < deadline, "the page does not load"
            time.sleep(0.05)

    def ask(self, expression):
        """The value of an expression of JavaScript, as JSON has it."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def press(self, key):
        """A key, as a person presses it: a character, or the name of a key."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        codes = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39}
        code = codes.get(key, ord(key[0]))
        parameters = {"key": key, "windowsVirtualKeyCode": code} | text
        self.call("Input.dispatchKeyEvent", type="keyDown", **parameters)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def click(self, x, y):
        place = {"x": x, "y": y, "button": "left", "clickCount": 1}
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, **place)


@contextlib.contextmanager
def browser(folder):
    """A Chromium whose profile is in this folder. It is ended by its id."""
    from websockets.sync.client import connect

    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += [f"--user-data-dir={folder}", "--remote-debugging-port=0", "about:blank"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = os.environ | {"HOME": str(folder)}
    process = subprocess.Popen(command, start_new_session=True, env=environment, **quiet)
    try:
        deadline, said = time.monotonic() + 30, folder / "DevToolsActivePort"
        while not (said.is_file() and said.read_text().count("\n")):
            assert process.poll() is None and time.monotonic() < deadline, "Chromium does not start"
            time.sleep(0.05)
        port = said.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as reply:
            (page,) = (each for each in json.load(reply) if each["type"] == "page")
        with connect(page["webSocketDebuggerUrl"], max_size=None) as socket:
            yield Browser(socket)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
