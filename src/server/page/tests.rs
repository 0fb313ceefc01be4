use super::*;
use crate::sample::PARAMETERS;
use crate::server::api::sampling;

/// Bytes of our own files together, and of the libraries.
const MAX_BYTES: [usize; 2] = [150 << 10, 1 << 20];

impl File {
    fn is_own(&self) -> bool {
        !self.path.contains("/third_party/")
    }

    fn text(&self) -> &'static str {
        std::str::from_utf8(self.bytes).unwrap()
    }
}

/// The files that are written for this page, with their texts.
fn own() -> impl Iterator<Item = (&'static str, &'static str)> {
    FILES.iter().filter(|file| file.is_own()).map(|file| (file.path, file.text()))
}

fn text(path: &str) -> &'static str {
    own().find(|(other, _)| *other == path).unwrap().1
}

#[test]
fn the_page_is_small() {
    for (is_own, most) in [true, false].into_iter().zip(MAX_BYTES) {
        let files = FILES.iter().filter(|file| file.is_own() == is_own);
        let bytes: usize = files.map(|file| file.bytes.len()).sum();
        assert!(bytes <= most, "{bytes} bytes, own: {is_own}");
    }
}

#[test]
fn every_file_that_is_named_is_there_and_every_file_is_named() {
    let name = r#""(?:\./|page/)([\w./-]+\.(?:js|css|svg))""#;
    let name = regex::Regex::new(name).unwrap();
    let mut named: Vec<String> = own()
        .flat_map(|(_, text)| name.captures_iter(text).map(|found| format!("/page/{}", &found[1])))
        .collect();
    let style = FILES.iter().find(|file| file.path.ends_with("katex.min.css")).unwrap().text();
    let font = regex::Regex::new(r"url\((fonts/\w+-\w+\.woff2)\)").unwrap();
    let fonts = font.captures_iter(style);
    named.extend(fonts.map(|found| format!("/page/third_party/{}", &found[1])));
    for path in &named {
        assert!(FILES.iter().any(|file| file.path == path), "{path}");
    }
    for file in FILES {
        assert!(file.path == "/" || named.iter().any(|path| path == file.path), "{}", file.path);
    }
}

#[test]
fn addresses_hold_below_any_path() {
    let absolute = regex::Regex::new(r#"(?:href="|src="|fetch\(.|ask\(.|get\(.|from ")/"#).unwrap();
    for (path, text) in own() {
        let found = absolute.find(text).map(|found| found.as_str());
        assert_eq!(found, None, "{path}");
    }
}

#[test]
fn what_a_browser_has_is_not_sent_again() {
    for given in FILES {
        let mut asked = HeaderMap::new();
        let whole = file(given.path, &asked).unwrap();
        assert_eq!(whole.status(), StatusCode::OK);
        asked.insert(header::IF_NONE_MATCH, whole.headers()[header::ETAG].clone());
        assert_eq!(file(given.path, &asked).unwrap().status(), StatusCode::NOT_MODIFIED);
        asked.insert(header::IF_NONE_MATCH, HeaderValue::from_static("\"other\""));
        assert_eq!(file(given.path, &asked).unwrap().status(), StatusCode::OK);
    }
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
    // The name of a format.
    let allowed = ["http://www.w3.org/2000/svg"];
    for (path, text) in own() {
        let text = allowed.iter().fold(text.to_owned(), |t, a| t.replace(a, ""));
        for word in banned {
            assert!(!text.contains(word), "{path}: {word}");
        }
    }
}

#[test]
fn settings_have_the_bounds_of_the_server() {
    let settings = text("/page/settings.js");
    let row = r#"\["(\w+)", "[^"]+", (-?[\d.e-]+), (-?[\d.e-]+), (true|false)\]"#;
    let mut names = Vec::new();
    for found in regex::Regex::new(row).unwrap().captures_iter(settings) {
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
    assert!(text("/").contains(r#"<form id="composer" class="composer" novalidate>"#));
}
