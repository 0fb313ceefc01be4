"""The page at `/` in headless Chromium, by selenium.

Needs the package selenium, `chromium` and `chromedriver`. `MOEBA_TEST_AXE`, the path of axe.min.js,
adds the checks of accessibility. `MOEBA_TEST_SCREENSHOTS` names a folder for the README's pictures.
"""

import json
import os
import shutil
import time
from pathlib import Path

from checks import KEY, URL, check, run, skip, wait_idle

try:
    from selenium import webdriver
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
except ImportError as error:
    skip(error)

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
if not BROWSER or not DRIVER:
    skip("no chromium or no chromedriver")

# Before any script of the page: what must not happen is noted.
WATCH = """
window.faults = [];
addEventListener("securitypolicyviolation",
  (e) => faults.push(`${e.violatedDirective} ${e.blockedURI}`));
addEventListener("error", (e) => faults.push(e.message));
addEventListener("unhandledrejection", (e) => faults.push(String(e.reason)));
"""

# A message and a seed whose answer by the demo model is longer than 600 tokens: it is still under
# way when the test looks.
LONG = ("Write about tests.", 12)

# Answers of chats come from `window.fake`: a list of deltas, each an event.
FAKE = """
window.realFetch ??= window.fetch;
window.sent = [];
window.fetch = async (path, options) => {
  if (path !== "v1/chat/completions" || !window.fake) return realFetch(path, options);
  sent.push(JSON.parse(options.body));
  const chunk = (more) => JSON.stringify({ system_fingerprint: "b0", choices: [], ...more });
  const events = fake.map((delta) => delta.progress
    ? chunk({ prompt_progress: delta.progress })
    : chunk({ choices: [{ index: 0, delta, finish_reason: null }] }));
  const last = { choices: [{ index: 0, delta: {}, finish_reason: "stop" }], moeba: { seed: 5 } };
  events.push(chunk(last), "[DONE]");
  const stream = new ReadableStream({ async start(controller) {
    for (const event of events) {
      controller.enqueue(new TextEncoder().encode(`data: ${event}\\n\\n`));
      await new Promise((done) => setTimeout(done, window.fakePause ?? 0));
    }
    controller.close();
  } });
  return new Response(stream, { headers: { "x-moeba-request-hash": "abc" } });
};
"""

# A hostile answer: each part would set `window.owned` or load something.
HOSTILE = """<script>window.owned = 1</script> <img src=x onerror="window.owned = 1">
<svg onload="window.owned = 1"></svg><iframe srcdoc="<script>parent.owned = 1</script>"></iframe>

# <img src=x onerror="window.owned = 1">

[click](javascript:window.owned=1) [data](data:text/html,<script>parent.owned=1</script>)
[vb](vbscript:x) [tab](java\tscript:window.owned=1) [rel](/slots)
![image](https://evil.example/x.png)
[good](https://example.com/a?b=c) https://example.com/auto <https://example.com/"onmouseover="x>

> <style>body { display: none }</style>
> - <base href="https://evil.example/">
>   1. **<a href="javascript:window.owned=1">bold</a>**

| <th onclick=window.owned=1> | b |
|---|---|
| <td><form action="https://evil.example"><input></form> | `<script>window.owned=1</script>` |

```<script>window.owned=1</script>
</code></pre><script>window.owned = 1</script>
```
"""


def start():
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu",
                     "--window-size=1400,900", "--force-device-scale-factor=1"]:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=DRIVER)
    browser = webdriver.Chrome(options=options, service=service)
    browser.set_script_timeout(120)
    browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": WATCH})
    return browser


browser = start()
js = browser.execute_script


def find(selector):
    return browser.find_element(By.CSS_SELECTOR, selector)


def all_of(selector):
    return browser.find_elements(By.CSS_SELECTOR, selector)


def until(what, seconds=30):
    """Waits for a condition: a function, or an expression of the page."""
    end = time.monotonic() + seconds
    while True:
        found = what() if callable(what) else js(f"return {what}")
        if found:
            return found
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.03)


def settle():
    """Waits until the last answer is whole."""
    until("!document.getElementById('send').hidden")


def last(part=""):
    return f"[...document.querySelectorAll('.message.assistant')].at(-1){part}"


def click(action, selector=".message.assistant"):
    """Clicks a button of the last message of a kind."""
    js("""[...document.querySelectorAll(arguments[0])].at(-1)
          .querySelector(`[data-action="${arguments[1]}"]`).click()""", selector, action)


def type_keys(keys):
    webdriver.ActionChains(browser).send_keys(keys).perform()


def set_field(name, value):
    js("""const field = document.getElementById(`set-${arguments[0]}`);
          field.value = arguments[1]; field.dispatchEvent(new Event("input"));""", name, value)


def fresh(**settings):
    """A new conversation with these settings alone."""
    for name in ["system", "temperature", "max_tokens", "seed", "tools"]:
        set_field(name, settings.get(name, ""))
    js("document.getElementById('new').click()")


def send(text):
    find("#prompt").send_keys(text)
    find("#send").click()


def fake(*deltas, pause=0):
    js(FAKE)
    js("window.fake = arguments[0]; window.fakePause = arguments[1]", list(deltas), pause)


def real():
    js("window.fake = null")


@check
def the_page_asks_for_a_key():
    browser.get(URL + "/")
    until("document.getElementById('key-dialog').open")
    assert js("return document.activeElement.id") == "key-input"
    type_keys(KEY + Keys.ENTER)
    until("document.getElementById('model').textContent === 'moeba-demo'")
    assert KEY in js("return JSON.stringify({...sessionStorage})")
    assert KEY not in js("return JSON.stringify({...localStorage})")
    until("document.querySelectorAll('#legend li').length > 3")


@check
def everything_comes_from_the_server():
    names = js("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert len(names) > 10 and all(name.startswith(URL + "/") for name in names), names
    text = find(".purpose").text
    assert "larger than memory" in text and "disk" in text


@check
def an_answer_streams_and_has_its_figures():
    fresh(max_tokens=80, seed=7, temperature=0.5)
    send("What is a branch?")
    lengths = set()
    while js("return document.getElementById('send').hidden"):
        lengths.add(len(js(f"return {last('')}.querySelector('.body').textContent")))
    assert len(lengths) > 3, lengths
    meta = js(f"return {last('')}.querySelector('.meta').textContent")
    parts = ["seed 7", "answer 80 tokens", "tokens/s", "of experts in memory", "cut by its length"]
    for part in parts:
        assert part in meta, meta


@check
def a_replay_has_the_same_bytes():
    click("replay")
    settle()
    found = js(f"return {last('')}.querySelector('.replay').textContent")
    assert found.startswith("Same seed, same bytes"), found
    assert "request " in found and "server b" in found and "SHA-256" in found, found


@check
def a_replay_of_other_bytes_says_so():
    text = js(f"return {last('')}.querySelector('.body').textContent")
    fake({"content": text[:10] + "?" + text[11:]})
    click("replay")
    settle()
    real()
    found = js(f"return {last('')}.querySelector('.replay').textContent")
    assert found.startswith("The bytes differ from byte 1"), found
    assert "is another one" in found, found


@check
def a_new_answer_is_another_version():
    before = js(f"return {last('')}.querySelector('.body').textContent")
    set_field("seed", 8)
    click("regenerate")
    settle()
    assert "2/2" in js(f"return {last('')}.querySelector('.branch').textContent")
    assert js(f"return {last('')}.querySelector('.body').textContent") != before
    click("previous")
    assert js(f"return {last('')}.querySelector('.body').textContent") == before
    click("next")
    assert js(f"return {last('')}.querySelector('.body').textContent") != before


@check
def an_edit_keeps_both_versions():
    first = js(f"return {last('')}.querySelector('.body').textContent")
    click("edit", ".message.user")
    area = find(".message.user textarea")
    area.clear()
    area.send_keys("What is a test?", Keys.CONTROL + Keys.ENTER)
    settle()
    assert find(".message.user .body").text == "What is a test?"
    assert "2/2" in find(".message.user .branch").text
    assert js(f"return {last('')}.querySelector('.body').textContent") != first
    click("previous", ".message.user")
    assert find(".message.user .body").text == "What is a branch?"
    assert js(f"return {last('')}.querySelector('.body').textContent") == first


@check
def stopping_keeps_the_text_and_frees_the_slot():
    fresh(max_tokens=2000, seed=LONG[1], temperature=1)
    send(LONG[0])
    until(f"{last('')}.querySelector('.body').textContent.length > 40")
    find("#stop").click()
    settle()
    wait_idle(10)
    assert "stopped" in js(f"return {last('')}.querySelector('.meta').textContent")
    assert len(js(f"return {last('')}.querySelector('.body').textContent")) > 40
    click("replay")
    settle()
    found = js(f"return {last('')}.querySelector('.replay').textContent")
    assert found.startswith("Same seed, same bytes"), found


@check
def the_request_has_what_was_set():
    fresh(system="Be brief.", temperature=0.25, seed=11, max_tokens=9,
          tools='[{"type": "function", "function": {"name": "f"}}]')
    fake({"content": "Yes."})
    send("Hello")
    settle()
    body = js("return sent.at(-1)")
    expected = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert body["messages"] == expected, body
    assert (body["temperature"], body["seed"], body["max_tokens"]) == (0.25, 11, 9)
    assert body["tools"][0]["function"]["name"] == "f" and body["return_progress"]
    real()


@check
def reasoning_is_folded_and_calls_are_shown():
    fresh()
    call = {"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": '{"town": "Oslo"}'}}
    fake({"progress": {"total": 100, "processed": 40, "cache": 10, "time_ms": 5}}, {},
         {"reasoning_content": "First I think."}, {"tool_calls": [call]}, {"tool_calls": [more]},
         pause=300)
    send("The weather?")
    until("document.querySelector('.prefill:not([hidden]) progress')?.value === 40")
    assert "40 of 100 tokens, 10 from the cache" in find(".prefill:not([hidden])").text
    settle()
    fold = find(".message.assistant .reasoning")
    assert not js("return arguments[0].open", fold) and "3 words" in fold.text
    assert "First I think." not in fold.text
    js("arguments[0].open = true", fold)
    assert "First I think." in fold.text
    assert "Call of weather" in find(".call").text and '"town": "Oslo"' in find(".call").text
    # The next message is the result.
    assert find("#prompt-label").text == "Result of weather"
    fake({"content": "Sunny."})
    send("20 degrees")
    settle()
    messages = js("return sent.at(-1).messages")
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"town": "Oslo"}'
    assert messages[2] == {"role": "tool", "tool_call_id": "call_1", "content": "20 degrees"}
    real()


@check
def hostile_output_is_inert():
    fresh()
    js("window.owned = 0")
    call = {"index": 0, "id": "x", "function": {"name": HOSTILE, "arguments": HOSTILE}}
    deltas = [{"content": HOSTILE[i:i + 7]} for i in range(0, len(HOSTILE), 7)]
    fake({"reasoning_content": HOSTILE}, *deltas, {"tool_calls": [call]})
    send("Attack")
    settle()
    time.sleep(0.3)
    assert js("return window.owned") == 0
    made = js("""const names = new Set();
        for (const e of document.querySelectorAll("#messages *")) {
          names.add(e.localName);
          for (const a of e.attributes) if (/^on|^src|^style$/.test(a.name)) names.add(a.name);
        }
        return [...names]""")
    known = {"article", "div", "strong", "span", "button", "details", "summary", "p", "pre", "code",
             "h2", "a", "blockquote", "ul", "ol", "li", "table", "thead", "tbody", "tr", "th", "td",
             "progress", "br"}
    assert set(made) <= known, set(made) - known
    links = js("return [...document.querySelectorAll('#messages a')].map((a) => [a.href, a.rel])")
    known = {"https://example.com/a?b=c", "https://example.com/auto", "https://evil.example/x.png",
             "https://example.com/%22onmouseover=%22x", "https://evil.example/"}
    assert {link for link, _ in links} <= known, links
    assert all("noopener" in rel for _, rel in links)
    body = js(f"return {last('')}.querySelector('.body').textContent")
    assert "<script>window.owned = 1</script>" in body and "[click](javascript:" in body
    real()


@check
def odd_text_is_drawn_in_time():
    n = 30_000
    for text in ["*a " * n, "[" * n, "`" * n, "# " + "#" * n + "x", "> " * n, "- " * n, "**" * n,
                 "[x](javascript:1)" * (n // 10), "|" * n + "\n" + "-|" * n, "_a_" * n,
                 "h" + "http://" * n, "http://" + "." * n, " " * n + "\n" + "- -" * n,
                 "~~~\n" * (n // 3), "\\[\n" * n, "\\(" * n, "$$a\n" * n, "$a " * n]:
        fresh()
        fake({"content": text})
        start = time.monotonic()
        send("x")
        settle()
        assert time.monotonic() - start < 5, text[:20]
    real()


@check
def markdown_is_drawn():
    fresh()
    text = ("# Title\n\nA **bold** and *thin* `code` word_with_lines.\n\n1. one\n2. two\n   - inner"
            "\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```rust\nfn main() {}\n```\n\n> said\n\n"
            "---\n\nEnd.")
    fake(*[{"content": part} for part in text])
    send("x")
    settle()
    found = js(f"return [...{last('')}.querySelectorAll('.body > *')].map((e) => e.localName)")
    assert found == ["h2", "p", "ol", "div", "div", "blockquote", "hr", "p"], found
    assert find(".md strong").text == "bold" and find(".md em").text == "thin"
    assert find(".md pre").text == "fn main() {}" and find(".md ol ul li").text == "inner"
    real()


@check
def the_map_moves_while_tokens_come():
    fresh(max_tokens=400, seed=LONG[1], temperature=1)
    picture = "return document.getElementById('heatmap').toDataURL()"
    figures = "return document.getElementById('figures').textContent"
    pictures, texts = {js(picture)}, set()
    send(LONG[0])
    while js("return document.getElementById('send').hidden"):
        pictures.add(js(picture))
        texts.add(js(figures))
        time.sleep(0.1)
    assert len(pictures) > 5 and len(texts) > 2, (len(pictures), len(texts))
    assert "of experts in memory" in js(f"return {last('')}.querySelector('.meta').textContent")
    legend = find("#legend").text
    assert "on disk" in legend and "in RAM" in legend
    assert "of memory hold a part of them" in find("#machine-note").text
    assert "Policy" in find("#verdict").text and "experts" in find("#memory").text
    js("document.getElementById('heatmap').scrollIntoView()")
    for offset in [0, 5]:
        pointer = webdriver.ActionChains(browser)
        pointer.move_to_element_with_offset(find("#heatmap"), offset - 100, offset).perform()
    until("document.getElementById('cell').textContent.startsWith('Layer ')")


@check
def the_map_says_what_the_server_says():
    found = js("""return (async () => {
        const { ask, events } = await import("/page/api.js");
        const control = new AbortController();
        const answer = await ask("/moeba/experts", { signal: control.signal });
        for await (const [name, data] of events(answer)) {
          control.abort();
          return [name, JSON.parse(data)];
        }
    })()""")
    name, event = found
    assert name == "experts" and len(event["places"]) == len(event["layers"])
    n = sum(layer["n_experts"] for layer in event["layers"])
    assert len(event["hits"]) == len(event["misses"]) == n == len("".join(event["places"]))
    shown = [int(text.rsplit(" ", 1)[1].replace(",", ""))
             for text in find("#legend").text.split("\n") if "used" not in text]
    assert sum(shown) == n, (shown, n)


@check
def conversations_are_exported_and_imported():
    fresh()
    fake({"content": "Two become one."})
    send("Explain merging.")
    settle()
    real()
    js("""window.files = [];
          URL.createObjectURL = (blob) => { files.push(blob); return "about:blank#"; };
          HTMLAnchorElement.prototype.click = () => {};""")
    find("#export-json").click()
    find("#export-markdown").click()
    texts = js("return Promise.all(files.map((file) => file.text()))")
    chat = json.loads(texts[0])
    assert len(chat["nodes"]) == 2 and chat["title"] == "Explain merging."
    assert texts[1] == ("# Explain merging.\n\n## You\n\nExplain merging.\n\n## Model\n\n"
                        "Two become one.\n")
    chat["title"] = "<img src=x onerror=window.owned=1>"
    path = Path("/tmp") / f"moeba-page-{os.getpid()}.json"
    path.write_text(json.dumps(chat))
    try:
        find("#import-file").send_keys(str(path))
        shown = "document.querySelector('#conversations [aria-current]').textContent"
        until(f"{shown}.startsWith('<img')")
    finally:
        path.unlink()
    assert len(all_of(".message")) == 2 and not all_of("#conversations img")


@check
def conversations_survive_a_reload():
    fresh()
    fake({"content": "Kept."})
    send("Keep this")
    settle()
    browser.refresh()
    until("document.querySelectorAll('.message').length === 2")
    assert find(".message.assistant .body").text == "Kept."
    assert not js("return document.getElementById('key-dialog').open")


@check
def the_keyboard_is_enough():
    js("document.activeElement.blur()")
    type_keys("?")
    until("document.getElementById('help-dialog').open")
    assert "Replay" in find("#help-dialog").text
    type_keys(Keys.ESCAPE)
    until("!document.getElementById('help-dialog').open")
    type_keys("n")
    until("document.activeElement.id === 'prompt'")
    for name, value in [("max_tokens", 2000), ("seed", LONG[1]), ("temperature", 1)]:
        set_field(name, str(value))
    type_keys(LONG[0] + Keys.ENTER)
    until(f"{last('')}?.querySelector('.body').textContent.length > 10")
    type_keys(Keys.ESCAPE)
    settle()
    assert "stopped" in js(f"return {last('')}.querySelector('.meta').textContent")
    # Every control is reached by Tab, and what has the focus is marked.
    seen = set()
    js("document.activeElement.blur()")
    for _ in range(200):
        type_keys(Keys.TAB)
        name, outline = js("""const e = document.activeElement;
            const name = e.id || e.dataset.action || e.className || e.localName;
            return [name, getComputedStyle(e).outlineStyle]""")
        assert name == "body" or outline != "none", name
        seen.add(name)
    wanted = {"new", "export-json", "messages", "edit", "regenerate", "replay", "prompt", "send",
              "theme", "key", "help", "heatmap"}
    assert wanted <= seen, wanted - seen
    js("document.getElementById('heatmap').focus()")
    type_keys(Keys.ARROW_RIGHT)
    until("document.getElementById('cell').textContent.startsWith('Layer ')")


@check
def light_and_dark_are_chosen():
    seen = set()
    for _ in range(3):
        find("#theme").click()
        seen.add(js("return getComputedStyle(document.body).backgroundColor"))
    assert len(seen) == 2, seen


@check
def a_phone_is_wide_enough():
    browser.set_window_size(500, 800)
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
        "width": 375, "height": 740, "deviceScaleFactor": 1, "mobile": True})
    try:
        for view in ["list", "chat", "machine"]:
            js(f"document.querySelector('.views [data-view={view}]').click()")
            wide = js("return document.documentElement.scrollWidth")
            assert wide <= 375, (view, wide)
            views = ["list", "chat", "machine"]
            shown = {one for one in views if find(f".columns > .{one}").is_displayed()}
            assert shown == {view}, shown
        until("document.querySelectorAll('#legend li').length > 3")
        check_axe("phone")
        js("document.querySelector('.views [data-view=chat]').click()")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.set_window_size(1400, 900)


def check_axe(where):
    path = os.environ.get("MOEBA_TEST_AXE")
    if not path:
        return
    js(Path(path).read_text())
    found = browser.execute_async_script("""const done = arguments[0];
        const failed = (e) => done([{ id: String(e), impact: "serious", nodes: [] }]);
        const options = { resultTypes: ["violations"] };
        axe.run(document, options).then((r) => done(r.violations), failed)""")
    bad = [(v["id"], [node["target"] for node in v["nodes"]]) for v in found
           if v["impact"] in ("serious", "critical")]
    assert not bad, (where, bad)
    print(f"        axe, {where}: {[v['id'] for v in found] or 'nothing found'}")


@check
def axe_finds_nothing_serious():
    if not os.environ.get("MOEBA_TEST_AXE"):
        print("        MOEBA_TEST_AXE is not set")
        return
    fresh()
    fake({"reasoning_content": "Well."}, {"content": HOSTILE})
    send("x")
    settle()
    real()
    find("#settings summary").click()
    for theme in ["light", "dark"]:
        js("document.documentElement.dataset.theme = arguments[0]", theme)
        time.sleep(0.2)
        check_axe(theme)
    find("#settings summary").click()
    js("document.activeElement.blur()")
    type_keys("?")
    check_axe("shortcuts")
    type_keys(Keys.ESCAPE)


def shrink(path):
    """Makes a picture small enough for the tree: few colours."""
    from PIL import Image
    with Image.open(path) as picture:
        kind = Image.Quantize.MAXCOVERAGE
        few = picture.convert("RGB").quantize(200, kind, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    assert path.stat().st_size <= 60_000, f"{path}: {path.stat().st_size} bytes"


@check
def pictures_are_taken():
    folder = os.environ.get("MOEBA_TEST_SCREENSHOTS")
    if not folder:
        return
    real()
    for theme, size, name in [("dark", (1240, 720), "wide"), ("light", (390, 760), "phone")]:
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
            "width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False})
        js("document.documentElement.dataset.theme = arguments[0]", theme)
        if name == "wide":
            js("window.confirm = () => true")
            for _ in all_of("[aria-label^=Delete]"):
                js("document.querySelector('[aria-label^=Delete]').click()")
            fresh(max_tokens=150, temperature=0.8, seed=21)
            send("What is a branch?")
            until(f"{last('')}?.querySelector('.body').textContent.length > 250", 120)
        else:
            js("document.querySelector('.views [data-view=machine]').click()")
            until("document.querySelectorAll('#legend li').length > 3")
            js("document.querySelector('.views [data-view=chat]').click()")
            click("regenerate")
            until(f"{last('')}?.querySelector('.body').textContent.length > 60", 120)
            js("document.querySelector('.views [data-view=machine]').click()")
            time.sleep(2)
        path = Path(folder) / f"{name}.png"
        browser.save_screenshot(str(path))
        shrink(path)
        js("document.getElementById('stop').click()")
        settle()
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@check
def nothing_was_reported():
    assert js("return window.faults") == []
    entries = [e for e in browser.get_log("browser") if e["level"] in ("SEVERE", "WARNING")]
    # The first requests had no key.
    entries = [e for e in entries if "401 (Unauthorized)" not in e["message"]]
    assert not entries, entries


try:
    run()
finally:
    browser.quit()
