//! Links between documents: to files that are there, and to headings that they have.

use super::report;
use regex::Regex;
use std::fs;
use std::path::{Path, PathBuf};

/// Folders that are no part of the tree.
const LEFT_OUT: &[&str] = &["target", ".git"];

fn documents(folder: &Path, out: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.is_dir() && !LEFT_OUT.contains(&name) {
            documents(&path, out);
        } else if name.ends_with(".md") {
            out.push(path);
        }
    }
}

/// The anchor of a heading, as GitHub makes it.
fn anchor(heading: &str) -> String {
    let is_kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    heading.trim().to_lowercase().chars().filter(is_kept).collect::<String>().replace(' ', "-")
}

/// The fault of a link of a document; `None` if it leads to a file and, if it names one, a heading.
fn fault(document: &Path, link: &str) -> Option<&'static str> {
    let (path, heading) = link.split_once('#').unwrap_or((link, ""));
    let target = match path {
        "" => document.to_owned(),
        path => document.parent()?.join(path),
    };
    if !target.exists() {
        return Some("no such file");
    }
    let text = || fs::read_to_string(&target).unwrap_or_default();
    let has = |text: String| {
        let mut headings = text.lines().filter(|line| line.starts_with('#'));
        headings.any(|line| anchor(line.trim_start_matches('#')) == heading)
    };
    (!heading.is_empty() && !has(text())).then_some("no such heading")
}

#[test]
fn links_lead_somewhere() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let link = Regex::new(r"\]\(([^)\s]+)\)").unwrap();
    let elsewhere = Regex::new(r"^[a-z]+:").unwrap();
    let (mut documents_of_tree, mut faults, mut n) = (Vec::new(), Vec::new(), 0);
    documents(root, &mut documents_of_tree);
    for document in documents_of_tree {
        let text = fs::read_to_string(&document).unwrap();
        let links = link.captures_iter(&text).map(|found| found.extract::<1>().1[0]);
        for link in links.filter(|link| !elsewhere.is_match(link)) {
            n += 1;
            let name = document.strip_prefix(root).unwrap().display();
            faults.extend(fault(&document, link).map(|why| format!("{name}: {link}: {why}")));
        }
    }
    assert!(n > 50, "{n} links");
    report(faults);
}

#[test]
fn anchors_are_those_of_headings() {
    assert_eq!(anchor(" Fields of Ollama's routes"), "fields-of-ollamas-routes");
    assert_eq!(anchor(" `--ram` and all"), "--ram-and-all");
}
