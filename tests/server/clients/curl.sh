#!/usr/bin/env bash
# The server through curl, as manuals write it: MOEBA_URL=… MOEBA_KEY=… tests/server/clients/curl.sh
set -u
url=${MOEBA_URL:-http://127.0.0.1:8080}
key=${MOEBA_KEY:-none}
command -v curl >/dev/null || { echo "skipped: no curl"; exit 77; }
failed=0

# expect NAME PATTERN TEXT: the text has a line that matches.
expect() {
    if grep -qE -e "$2" <<<"$3"; then
        echo "ok      $1"
    else
        echo "FAILED  $1: no $2 in: ${3:0:600}"
        failed=1
    fi
}

ask() { curl -sS --max-time 300 -H "Authorization: Bearer $key" "$@"; }
hello='{"messages": [{"role": "user", "content": "What is a branch?"}], "max_tokens": 8, "seed": 7'

expect "health needs no key" '"status": ?"ok"' "$(curl -sS "$url/health")"
expect "a missing key is 401" '^401$' \
    "$(curl -sS -o /dev/null -w '%{http_code}' "$url/v1/models")"
expect "models" '"id": ?"moeba-demo"' "$(ask "$url/v1/models")"
# curl -d sends a form's content type.
expect "a chat" '"object": ?"chat.completion"' "$(ask "$url/v1/chat/completions" -d "$hello}")"
stream=$(ask -N "$url/v1/chat/completions" -H 'Content-Type: application/json' \
    -d "$hello, \"stream\": true}")
expect "a stream begins with the role" '^data: .*"role": ?"assistant"' "$(head -1 <<<"$stream")"
expect "a stream ends" '^data: \[DONE\]$' "$stream"
expect "headers" '^[Xx]-[Rr]equest-[Ii]d: req_' \
    "$(ask -D - "$url/v1/chat/completions" -d "$hello}")"
expect "llama-server's completion" '"content": ?"' \
    "$(ask "$url/completion" -d '{"prompt": "The", "n_predict": 4}')"
expect "tokens" '"tokens": ?\[[0-9]' "$(ask "$url/tokenize" -d '{"content": "Hello"}')"
expect "metrics" '^moeba_requests_total' "$(ask "$url/metrics")"
expect "an error" '"param": ?"max_tokens"' \
    "$(ask "$url/v1/chat/completions" -d "${hello/8/\"x\"}}")"
expect "a wrong method is 405" '^405$' \
    "$(ask -o /dev/null -w '%{http_code}' -X DELETE "$url/v1/models")"
expect "a body that expects to be asked for" '"content": ?"' \
    "$(ask -H 'Expect: 100-continue' "$url/completion" -d '{"prompt": "The", "n_predict": 4}')"
expect "a body in chunks" '"content": ?"' \
    "$(ask -H 'Transfer-Encoding: chunked' "$url/completion" \
        -d '{"prompt": "The", "n_predict": 4}')"
# A client that goes does not harm the next one.
timeout 1 curl -sN -H "Authorization: Bearer $key" "$url/v1/chat/completions" \
    -d "${hello/\"max_tokens\": 8/\"max_tokens\": -1, \"ignore_eos\": true}, \"stream\": true}" \
    >/dev/null
expect "after a client has gone" '"status": ?"ok"' "$(curl -sS "$url/health")"
exit $failed
