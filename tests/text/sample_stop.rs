//! Stop strings: found across parts, held back no longer than needed.

use moeba::sample::StopMatcher;
use proptest::prelude::*;

fn matcher(stops: &[&str]) -> StopMatcher {
    StopMatcher::new(stops.iter().map(|s| s.to_string()))
}

/// All text passed on, and the stop string.
fn run(stops: &[&str], parts: &[&str]) -> (String, Option<String>) {
    let mut matcher = matcher(stops);
    let mut out = String::new();
    for part in parts {
        let stopped = matcher.push(part);
        out.push_str(stopped.text);
        if let Some(by) = stopped.by {
            let by = by.to_string();
            assert_eq!(matcher.push("more").text, "");
            assert_eq!(matcher.finish(), "");
            return (out, Some(by));
        }
    }
    out.push_str(matcher.finish());
    (out, None)
}

#[test]
fn found_across_parts() {
    let by = |s: &str| Some(s.to_string());
    assert_eq!(run(&["</s>"], &["ab<", "/", "s>c"]), ("ab".into(), by("</s>")));
    assert_eq!(run(&["</s>"], &["ab<", "/", "x"]), ("ab</x".into(), None));
    assert_eq!(run(&["</s>"], &["ab<", "/"]), ("ab</".into(), None));
    assert_eq!(run(&[], &["ab"]), ("ab".into(), None));
    assert_eq!(run(&[""], &["ab"]), ("ab".into(), None));
    assert_eq!(run(&["aab"], &["aaa", "ab"]), ("aa".into(), by("aab")));
    assert_eq!(run(&["→"], &["a", "→b"]), ("a".into(), by("→")));
}

#[test]
fn the_stop_string_that_ends_first_counts() {
    for parts in [&["abcd"][..], &["a", "b", "c", "d"], &["ab", "cd"]] {
        assert_eq!(run(&["abcd", "bc"], parts), ("a".into(), Some("bc".into())));
    }
}

#[test]
fn text_is_passed_on_as_soon_as_it_is_clear() {
    let mut matcher = matcher(&["User:"]);
    assert_eq!(matcher.push("hello Us").text, "hello ");
    assert_eq!(matcher.push("ually").text, "Usually");
    assert_eq!(matcher.push(" a U").text, " a ");
    assert_eq!(matcher.push("Use").text, "U");
}

proptest! {
    /// However a text is cut, the result is that of the whole text.
    #[test]
    fn parts_do_not_matter(
        text in "[abé]{0,40}",
        stops in prop::collection::vec("[abé]{1,4}", 0..4),
        cuts in prop::collection::vec(0..40usize, 0..10),
    ) {
        let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
        let mut cuts: Vec<usize> =
            cuts.into_iter().filter(|&c| c <= text.len() && text.is_char_boundary(c)).collect();
        cuts.extend([0, text.len()]);
        cuts.sort_unstable();
        let parts: Vec<&str> = cuts.windows(2).map(|w| &text[w[0]..w[1]]).collect();
        let chars: Vec<String> = text.chars().map(String::from).collect();
        let chars: Vec<&str> = chars.iter().map(String::as_str).collect();
        let by_char = run(&stops, &chars);
        prop_assert_eq!(&run(&stops, &parts), &by_char);
        prop_assert_eq!(&run(&stops, &[&text]), &by_char);
    }
}
