use super::*;
use crate::sample::PARAMETERS;
use crate::server::api::sampling;

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

#[test]
fn settings_have_the_bounds_of_the_server() {
    let settings = FILES.iter().find(|file| file.path == "/page/settings.js").unwrap();
    let row = r#"\["(\w+)", "[^"]+", (-?[\d.e-]+), (-?[\d.e-]+), (true|false)\]"#;
    let mut names = Vec::new();
    for found in regex::Regex::new(row).unwrap().captures_iter(settings.text) {
        let [name, least, most, is_whole] = found.extract().1;
        names.push(name);
        let parameter = PARAMETERS.iter().find(|p| sampling::field(p) == name);
        let Some(parameter) = parameter else { continue };
        assert_eq!(parameter.is_whole(), is_whole == "true", "{name}");
        // The server reads reals as numbers of 32 bits.
        let number = |text: &str| match parameter.is_whole() {
            true => text.parse::<f64>().unwrap(),
            false => f64::from(text.parse::<f32>().unwrap()),
        };
        let takes = |value| sampling::takes(name, parameter, value);
        let (least, most) = (number(least), number(most));
        let step = |value: f64| if parameter.is_whole() { 1.0 } else { value.abs() / 8.0 + 1e-7 };
        assert!(takes(least) && !takes(least - step(least)), "{name}: {least}");
        assert!(takes(most) && !takes(most + step(most)), "{name}: {most}");
    }
    let all = "temperature top_p top_k min_p repeat_penalty presence_penalty max_tokens seed";
    assert_eq!(names.join(" "), all);
}

#[test]
fn fields_are_checked_by_the_page_and_not_by_the_form() {
    let index = FILES.iter().find(|file| file.path == "/").unwrap();
    assert!(index.text.contains(r#"<form id="composer" class="composer" novalidate>"#));
}
