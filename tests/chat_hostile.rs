//! Templates and grammars that attack: each ends in one sentence, soon, within bounded memory.

use moeba::chat::ChatTemplate;
use moeba::meter::CountingAllocator;
use moeba::sample::grammar::{Grammar, sandbox};
use serde_json::{Map, json};
use std::time::{Duration, Instant};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn render(source: &str) -> moeba::Result<String> {
    let messages = json!([{"role": "user", "content": "hi"}]);
    ChatTemplate::new(source, "<s>", "</s>")?.render(&messages, None, true, &Map::new())
}

/// The sentence; the template must not need more than a few seconds for it.
fn refusal(source: &str) -> String {
    let start = Instant::now();
    let error = render(source).expect_err("a hostile template was rendered");
    assert!(start.elapsed() < Duration::from_secs(15), "{:?}: {error}", start.elapsed());
    let sentence = error.to_string();
    assert!(sentence.starts_with("the chat template"), "{sentence}");
    assert!(!sentence.contains('\n'), "{sentence}");
    sentence
}

fn refused(source: &str, because: &str) {
    let sentence = refusal(source);
    let start: String = source.chars().take(80).collect();
    assert!(sentence.contains(because), "{start}: {sentence}");
}

#[test]
fn loops_without_end_run_out_of_fuel() {
    let nested = |n: usize, body: &str| {
        let (open, close) = ("{% for i in range(99999) %}", "{% endfor %}");
        format!("{}{body}{}", open.repeat(n), close.repeat(n))
    };
    refused(&nested(3, ""), "fuel");
    refused(&nested(3, "x"), "fuel");
    refused(
        "{% macro f(n) %}{% for i in range(99999) %}{% set x = [i] %}{% endfor %}{% endmacro %}\
             {% for i in range(99999) %}{{ f(i) }}{% endfor %}",
        "fuel",
    );
}

#[test]
fn huge_ranges_and_repetitions_are_refused() {
    refused("{% for i in range(10**9) %}{% endfor %}", "range");
    refused("{{ range(10**9) | list }}", "range");
    refused("{{ 'ab' * 10**9 }}", "too large");
    refused("{{ 'ab' * 10**30 }}", "");
    refused("{{ [1] * 10**10 }}", "");
    refused("{{ 10 ** 10 ** 10 }}", "");
    refused("{% for i in range(99999) %}{{ 'ab' * 10**6 }}{% endfor %}", "bytes of text");
}

#[test]
fn memory_is_bounded() {
    let memory = "MiB of memory";
    let doubling = |set: &str| {
        format!("{{% set ns = namespace(x='abcd') %}}{{% for i in range(60) %}}{set}{{% endfor %}}")
    };
    refused(&doubling("{% set ns.x = ns.x ~ ns.x %}"), memory);
    refused(&doubling("{% set ns.x = ns.x + ns.x %}"), memory);
    let replaced = "{% set ns.x = ns.x | replace('a', 'aa') | replace('b', 'ab') %}";
    refused(&doubling(replaced), "too large");
    let text = "bytes of text";
    refused(&doubling("{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}"), text);
    refused(&format!("{{% set a = 'abcd' %}}{}", "{% set a = a ~ a %}".repeat(60)), memory);
    refused(
        "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% for j in range(99999) %}\
             {% set ns.x = ns.x + [i, j] %}{% endfor %}{% endfor %}{{ ns.x | length }}",
        "",
    );
    refused("{{ ('ab' * 10**6) | map('upper') | map('center', 10**6) | list | join }}", "");
}

#[test]
fn deep_nesting_is_refused() {
    for n in [200, 2_000, 20_000] {
        refusal(&format!("{}1{}", "{{ ".to_string() + &"(".repeat(n), ")".repeat(n) + " }}"));
        refusal(&format!("{{{{ {}1{} }}}}", "[".repeat(n), "]".repeat(n)));
        let _ = render(&format!("{{{{ {}1 }}}}", "not ".repeat(n)));
        refusal(&format!("{}x{}", "{% if 1 %}".repeat(n), "{% endif %}".repeat(n)));
    }
    refused("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion");
    refused("{% for x in [1] recursive %}{{ loop([x]) }}{% endfor %}", "recursion");
}

/// Values nested by a loop: printing and dropping them must not overflow the stack.
#[test]
fn nested_values_do_not_overflow_the_stack() {
    let nest = |n: &str, wrap: &str, then: &str| {
        format!(
            "{{% set ns = namespace(x=1) %}}{{% for i in range(99999) %}}\
             {{% for j in range({n}) %}}{{% set ns.x = {wrap} %}}{{% endfor %}}{{% endfor %}}{then}"
        )
    };
    let wraps = ["[ns.x]", "{'a': ns.x}", "(ns.x,)", "[1] + [ns.x]", "ns.x | default([ns.x])"];
    for wrap in wraps {
        for then in ["{{ ns.x }}", "{{ ns.x | tojson }}", "{{ ns.x | string }}", "{{ ns.x == 1 }}"]
        {
            // Whether it renders does not matter: it must end, and not by a crash.
            let _ = render(&nest("1", wrap, then));
        }
    }
    let start = Instant::now();
    let _ = render(&nest("99999", wraps[0], ""));
    assert!(start.elapsed() < Duration::from_secs(15));
}

#[test]
fn other_files_and_templates_are_out_of_reach() {
    for statement in [
        "{% include '/etc/passwd' %}",
        "{% import '/etc/passwd' as p %}",
        "{% from 'chat_template' import x %}",
        "{% extends '/etc/passwd' %}",
    ] {
        refused(statement, "");
    }
    refused("{% include 'chat_template' %}", "include");
}

#[test]
fn sources_that_are_no_templates_are_refused() {
    refused(&"x".repeat(300_000), "bytes");
    refused("{% if %}", "line 1");
    refused("{{ unknown() }}", "unknown");
    refused("{{ messages[", "");
    refused("{% for m in messages %}", "");
}

#[test]
fn the_templates_own_refusals_are_passed_on() {
    let sentence = refusal("{{ raise_exception('roles must alternate') }}");
    assert_eq!(sentence, "the chat template refuses these messages: roles must alternate");
}

/// One operation that makes much of little: a width, a count, a number of items.
#[test]
fn counts_are_bounded() {
    for source in [
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10 ** 9, 1) }}",
        "{{ '%.1000000000f' % 1 }}",
        "{{ '{:1000000000}'.format('a') }}",
        "{{ '{:.1000000000f}'.format(1.5) }}",
        "{{ 'a'.ljust(10 ** 9) }}",
        "{{ 'a'.rjust(10 ** 9) }}",
        "{{ 'a'.zfill(10 ** 9) }}",
        "{{ 'a' | center(10 ** 9) }}",
        "{{ '\\t'.expandtabs(10 ** 9) }}",
        "{{ 'a\\nb' | indent(10 ** 9) }}",
        "{{ [1] | batch(10 ** 9, 0) | list }}",
        "{{ [1] | slice(10 ** 9) | list }}",
        "{{ [1] | tojson(indent=10 ** 9) }}",
        "{{ ('a' * 10 ** 6).replace('a', 'b' * 10 ** 6) }}",
        "{{ ('a' * 10 ** 6).replace('', 'b' * 10 ** 6) }}",
        "{{ ('a' * 10 ** 6) | replace('a', 'b' * 10 ** 6) }}",
        "{{ ('a' * 10 ** 6).translate({97: 'b' * 10 ** 6}) }}",
        "{{ ('\\n' * 10 ** 6) | indent('b' * 10 ** 6, blank=true) }}",
        "{{ ('%s' * 10 ** 5) % (('a' * 10 ** 6,) * 10 ** 5) }}",
        "{{ ('{0}' * 10 ** 5).format('a' * 10 ** 6) }}",
        "{{ ('b' * 10 ** 6).join('a' * 10 ** 6) }}",
        "{{ ('a' * 10 ** 6) | join('b' * 10 ** 6) }}",
        "{{ (['a' * 10 ** 6] * 10 ** 6) | join }}",
        "{{ (['a' * 10 ** 6] * 10 ** 6) | string }}",
        "{{ (['a' * 10 ** 6] * 10 ** 6) | tojson }}",
        "{{ 10 ** 40 }}",
    ] {
        refusal(source);
    }
    assert_eq!(render("{{ messages[:0][::-1] }}").unwrap(), "[]");
}

/// Values that hold each other are let go with the template that made them.
#[test]
fn circles_of_values_are_let_go() {
    for source in [
        "{% set ns = namespace() %}{% set ns.self = ns %}{% set ns.x = [ns] %}",
        "{% macro m() %}{{ m }}{% endmacro %}{% set x = [m] %}",
        "{% set ns = namespace(x=[]) %}{% set _ = ns.x.append(ns) %}",
    ] {
        let start = Instant::now();
        let big = format!("{{% set b = 'a' * 10 ** 7 %}}{source}");
        (0..100).for_each(|_| drop(render(&big).unwrap()));
        assert!(start.elapsed() < Duration::from_secs(15));
    }
}

#[test]
fn many_renders_at_once_do_not_disturb_each_other() {
    std::thread::scope(|scope| {
        for i in 0..16 {
            scope.spawn(move || match i % 2 {
                0 => assert_eq!(render("{{ messages[0].content }}").unwrap(), "hi"),
                _ => refused(&"{% set a = 'ab' %}".replace("'ab'", "'ab' * 90000000"), ""),
            });
        }
    });
}

/// Bytes of this process in memory.
fn resident_bytes() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let n_pages: usize = pages.split(' ').nth(1).unwrap().parse().unwrap();
    n_pages * rustix::param::page_size()
}

/// Another process tries them out, and ends with the memory that they take; whoever comes with
/// another grammar still gets it compiled.
#[test]
fn grammars_whose_states_multiply_are_given_up_and_others_served() {
    let bad = |n: usize| {
        let part = |i: usize| json!({ "pattern": format!("a.{{{i}}}b|{n}") });
        let parts: Vec<_> = (0..60).map(part).collect();
        let schema = json!({ "type": "string", "allOf": parts });
        let error = Grammar::JsonSchema(schema).check().unwrap_err().to_string();
        assert!(error.starts_with("compiling the JSON schema "), "{error}");
        assert!(error.contains("MiB of memory") || error.contains("seconds"), "{error}");
    };
    let good = || {
        let schema = json!({ "type": "object", "properties": {
            "name": { "type": "string", "pattern": "^[a-z]+$" },
            "tags": { "type": "array", "items": { "enum": ["a", "b"] } } } });
        Grammar::JsonSchema(schema).check().unwrap();
        Grammar::Gbnf("root ::= [a-z]+".into()).check().unwrap();
    };
    sandbox::use_program(env!("CARGO_BIN_EXE_moeba").into());
    good();
    let before = resident_bytes();
    // One after the other: the rest of this file measures time.
    (0..40).for_each(bad);
    let held = resident_bytes().saturating_sub(before);
    assert!(held < 64 << 20, "{} MiB stay", held >> 20);
    good();
}
