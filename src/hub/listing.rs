//! Answers of the hub's API: the commit of a branch, the files of a commit. Nothing in them is
//! trusted: names that lead out of the cache are dropped.

use super::names;
use serde_json::Value;

/// A file of a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteFile {
    pub path: String,
    pub size: Option<u64>,
    /// The name of its content in the cache.
    pub etag: String,
}

impl RemoteFile {
    /// The content's SHA-256, where that is its name: of all files that Git's large file storage
    /// holds, and so of models.
    pub fn sha256(&self) -> Option<&str> {
        names::is_sha256(&self.etag).then_some(&self.etag)
    }
}

/// The commit that `GET api/models/REPO/revision/BRANCH` tells.
pub fn commit(json: &[u8]) -> Result<String, String> {
    let value: Value = serde_json::from_slice(json).map_err(|e| format!("no JSON: {e}"))?;
    match value.get("sha").and_then(Value::as_str) {
        Some(sha) if names::is_commit(sha) => Ok(sha.into()),
        other => Err(format!("sha: expected a commit of 40 hexadecimal digits, got {other:?}")),
    }
}

/// The files on one page of `GET api/models/REPO/tree/COMMIT?recursive=true`.
pub fn files(json: &[u8]) -> Result<Vec<RemoteFile>, String> {
    let value: Value = serde_json::from_slice(json).map_err(|e| format!("no JSON: {e}"))?;
    let items = value.as_array().ok_or("expected a list of files")?;
    Ok(items.iter().filter_map(file).collect())
}

fn file(item: &Value) -> Option<RemoteFile> {
    let text = |value: &Value, key: &str| Some(value.get(key)?.as_str()?.to_owned());
    if text(item, "type")? != "file" {
        return None;
    }
    let path = text(item, "path")?;
    let large = item.get("lfs").filter(|lfs| lfs.is_object());
    let etag = text(large.unwrap_or(item), "oid");
    let size = large.and_then(|l| l.get("size")).or_else(|| item.get("size"));
    match etag {
        Some(etag) if names::is_safe_path(&path) && names::is_object_id(&etag) => {
            Some(RemoteFile { path, size: size.and_then(Value::as_u64), etag })
        }
        _ => {
            log::warn!(
                "the hub lists a file without a usable checksum, which is skipped: {path:?}"
            );
            None
        }
    }
}

/// The next page, by a `Link` header: `<https://…>; rel="next"`.
pub fn next_page(link: &str) -> Option<&str> {
    let entry = link.split(',').find(|entry| entry.replace(' ', "").contains("rel=\"next\""))?;
    let (url, _) = entry.trim().strip_prefix('<')?.split_once('>')?;
    Some(url)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn files_of(value: &Value) -> Vec<RemoteFile> {
        files(value.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn a_large_file_is_named_by_its_sha256() {
        let (sha1, sha256) = ("01".repeat(20), "ab".repeat(32));
        let listed = files_of(&json!([
            {"type": "directory", "path": "sub", "oid": sha1, "size": 0},
            {"type": "file", "path": "README.md", "oid": sha1, "size": 7},
            {"type": "file", "path": "sub/m.gguf", "oid": sha1, "size": 130,
             "lfs": {"oid": sha256, "size": 99, "pointerSize": 130}, "xetHash": "x"},
        ]));
        let [readme, model] = &listed[..] else { panic!("{listed:?}") };
        assert_eq!(
            (readme.path.as_str(), readme.size, readme.sha256()),
            ("README.md", Some(7), None)
        );
        assert_eq!((model.path.as_str(), model.size), ("sub/m.gguf", Some(99)));
        assert_eq!(model.sha256(), Some(sha256.as_str()));
    }

    #[test]
    fn what_leads_out_of_the_cache_is_left_out() {
        let oid = "ab".repeat(32);
        for (path, oid) in [
            ("../../m.gguf", oid.as_str()),
            ("/etc/m.gguf", &oid),
            ("m.gguf", "../../../m"),
            ("m.gguf", ""),
        ] {
            let lfs = json!({"oid": oid, "size": 1});
            let item = json!({"type": "file", "path": path, "oid": "x", "lfs": lfs});
            assert!(files_of(&json!([item])).is_empty(), "{path} {oid}");
        }
        let odd = json!([1, null, {"type": "file"}, {"type": "file", "path": "a"}, {"path": "b"}]);
        assert!(files_of(&odd).is_empty());
        let sizes = json!([{"type": "file", "path": "a", "oid": oid, "size": -1}]);
        assert_eq!(files_of(&sizes)[0].size, None);
    }

    #[test]
    fn answers_of_another_shape_are_errors() {
        assert!(files(b"{}").is_err() && files(b"<html>").is_err());
        assert!(commit(b"[]").is_err() && commit(b"").is_err());
        assert!(commit(br#"{"sha": "../../x"}"#).unwrap_err().contains("40 hexadecimal"));
        let sha = "0f".repeat(20);
        assert_eq!(commit(json!({ "sha": sha }).to_string().as_bytes()), Ok(sha));
    }

    #[test]
    fn pages_are_linked() {
        let link = r#"<https://h/a?x=1>; rel="prev", <https://h/b?cursor=c%3D>; rel="next""#;
        assert_eq!(next_page(link), Some("https://h/b?cursor=c%3D"));
        assert_eq!(next_page(r#"<https://h/a>; rel="last""#), None);
        assert_eq!(next_page("rel=\"next\""), None);
    }
}
