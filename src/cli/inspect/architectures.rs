//! The architectures that run, as a table in Markdown: `models/README.md` has a copy.

use crate::model::descriptor::Descriptor;
use std::fmt::Write as _;

pub fn table() -> String {
    let mut out = String::from(
        "| GGUF name | Hugging Face classes | first model | what is particular | compared with |\n\
         |---|---|---|---|---|\n",
    );
    for d in Descriptor::all() {
        let classes: Vec<String> = d.hf_classes.iter().map(|class| format!("`{class}`")).collect();
        let about = &d.about;
        let _ = writeln!(
            out,
            "| `{}` | {} | {} | {} | {} |",
            d.architecture,
            classes.join(", "),
            about.first,
            about.particular,
            about.compared_with
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::table;

    #[test]
    fn the_readme_has_the_table() {
        let readme = include_str!("../../../models/README.md");
        assert!(readme.contains(&table()), "replace the table of models/README.md:\n{}", table());
    }
}
