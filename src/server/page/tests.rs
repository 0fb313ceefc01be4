use super::*;

/// Bytes of all files together.
const MAX_BYTES: usize = 150 << 10;

#[test]
fn the_page_is_small() {
    let bytes: usize = FILES.iter().map(|file| file.text.len()).sum();
    assert!(bytes <= MAX_BYTES, "{bytes} bytes");
}

#[test]
fn every_file_that_is_named_is_there() {
    let name = regex::Regex::new(r#"(?:href|src|from)=?\s*"(?:\./|/page/)([\w.]+)""#).unwrap();
    let mut n_names = 0;
    for file in FILES {
        for found in name.captures_iter(file.text) {
            let path = format!("/page/{}", &found[1]);
            assert!(FILES.iter().any(|other| other.path == path), "{}: {path}", file.path);
            n_names += 1;
        }
    }
    assert!(n_names >= FILES.len() - 1, "{n_names}");
}

#[test]
fn nothing_is_inline_and_nothing_is_read_as_markup() {
    let banned = [
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        " style=\"",
        " onclick=",
        "http://",
        "https://",
    ];
    // The names of formats, and what the renderer compares links with.
    let allowed = ["http://www.w3.org/2000/svg", "\"https://\"", "\"http://\""];
    for file in FILES {
        let text = allowed.iter().fold(file.text.to_owned(), |t, a| t.replace(a, ""));
        for word in banned {
            assert!(!text.contains(word), "{}: {word}", file.path);
        }
    }
}
