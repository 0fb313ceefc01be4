//! Downloads from a hub, against a server on this machine that does what real ones do: it cuts,
//! ignores ranges, redirects, refuses, stalls and lies.

use common::hub::{
    COMMIT, Cache, Reply, Repo, Request, Server, TOKEN, content, fetch, ranged, refused, sha256,
    wanted,
};
use moeba::hub::{Hub, RepoId};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

const FILE: &str = "m-Q4_K_M.gguf";

fn one_file(content: &[u8]) -> Repo {
    Repo::new(&[(FILE, content)])
}

/// A hub that answers the `n`th request for a file by `fault`, if that has an answer.
fn faulty(
    repo: Repo,
    fault: impl Fn(usize, &Request, Reply) -> Reply + Send + Sync + 'static,
) -> Server {
    let n = AtomicUsize::new(0);
    Server::new(move |request| {
        let reply = repo.answer(request);
        if !request.is_resolve() {
            return reply;
        }
        fault(n.fetch_add(1, Ordering::SeqCst), request, reply)
    })
}

#[test]
fn a_file_goes_where_all_hub_programs_look() {
    let bytes = content(3_000_000, 1);
    let (cache, repo) =
        (Cache::new(), Repo::new(&[("README.md", b"x"), ("sub/m-Q4_K_M.gguf", &bytes)]));
    let server = Server::new(move |request| repo.answer(request));
    let mut steps = Vec::new();
    let hub = cache.hub(&server);
    let path = hub.fetch(&wanted("user/model"), &mut |s| {
        steps.push((s.done, s.total));
        Ok(())
    });
    let path = path.unwrap();
    assert_eq!(fs::read(&path).unwrap(), bytes);
    let snapshot = format!("hub/models--user--model/snapshots/{COMMIT}/sub/m-Q4_K_M.gguf");
    let sha = sha256(&bytes);
    let expected = [
        format!("hub/.locks/models--user--model/{sha}.lock"),
        format!("hub/models--user--model/blobs/{sha}"),
        "hub/models--user--model/refs/main".into(),
        snapshot.clone(),
    ];
    assert_eq!(cache.tree(), expected);
    assert_eq!(path, cache.dir.path().join(snapshot));
    assert_eq!(fs::read_link(&path).unwrap(), Path::new("../../../blobs").join(&sha));
    assert_eq!(fs::read_to_string(cache.repo().join("refs/main")).unwrap(), COMMIT);
    assert!(steps.is_sorted() && steps.len() > 2, "{steps:?}");
    assert_eq!((steps[0], *steps.last().unwrap()), ((0, 3_000_000), (3_000_000, 3_000_000)));
    // What is there is not asked for again.
    assert_eq!(fetch(&hub, "user/model").unwrap(), path);
    assert_eq!(server.resolved().len(), 1);
}

#[test]
fn a_cut_download_goes_on_where_it_was() {
    let bytes = content(100_000, 2);
    let cut = |n, _: &Request, reply: Reply| if n < 2 { reply.cut(30_000) } else { reply };
    let (cache, server) = (Cache::new(), faulty(one_file(&bytes), cut));
    let path = fetch(&cache.hub(&server), "user/model").unwrap();
    assert_eq!(fs::read(path).unwrap(), bytes);
    let from: Vec<usize> = server.resolved().iter().map(Request::from).collect();
    assert_eq!(from, [0, 30_000, 60_000]);
    assert!(!cache.incomplete(&bytes).exists());
}

#[test]
fn another_process_goes_on_too() {
    let bytes = content(100_000, 3);
    let cache = Cache::new();
    let server = faulty(one_file(&bytes), |_, _, reply| reply.cut(0));
    fs::create_dir_all(cache.repo().join("blobs")).unwrap();
    fs::write(cache.incomplete(&bytes), &bytes[..40_000]).unwrap();
    // All tries bring nothing: what is there stays, and no snapshot or branch names it.
    refused(fetch(&cache.hub(&server), "user/model"), &["the connection broke"]);
    assert_eq!(fs::read(cache.incomplete(&bytes)).unwrap(), bytes[..40_000]);
    assert!(!cache.repo().join("refs").exists() && !cache.repo().join("snapshots").exists());
    assert_eq!(server.resolved().len(), 3);
    let whole = faulty(one_file(&bytes), |_, _, reply| reply);
    assert_eq!(fs::read(fetch(&cache.hub(&whole), "user/model").unwrap()).unwrap(), bytes);
    assert_eq!(whole.resolved()[0].from(), 40_000);
}

#[test]
fn a_server_without_ranges_starts_again() {
    let bytes = content(50_000, 4);
    let whole = bytes.clone();
    let ignore = move |n, _: &Request, _| {
        let reply = Reply::new(200, whole.clone());
        if n == 0 { reply.cut(20_000) } else { reply }
    };
    let (cache, server) = (Cache::new(), faulty(one_file(&bytes), ignore));
    assert_eq!(fs::read(fetch(&cache.hub(&server), "user/model").unwrap()).unwrap(), bytes);
    assert_eq!(server.resolved()[1].from(), 20_000);
}

#[test]
fn ranges_that_do_not_fit_are_not_believed() {
    let bytes = content(50_000, 5);
    let whole = bytes.clone();
    let shifted = move |n, request: &Request, reply: Reply| match n {
        0 => reply.cut(20_000),
        // The bytes from the beginning under the name of the rest, and a rest that is none.
        1 => Reply::new(206, &whole[..30_000]).with("Content-Range", "bytes 0-29999/50000"),
        2 => {
            assert_eq!(request.from(), 0, "what was there is gone");
            reply.cut(10_000)
        }
        3 => Reply::new(416, ""),
        _ => reply,
    };
    let (cache, server) = (Cache::new(), faulty(one_file(&bytes), shifted));
    assert_eq!(fs::read(fetch(&cache.hub(&server), "user/model").unwrap()).unwrap(), bytes);
    assert_eq!(server.resolved().len(), 5);
}

#[test]
fn a_wrong_checksum_deletes_what_came() {
    let bytes = content(50_000, 6);
    let mut wrong = bytes.clone();
    wrong[40_000] ^= 1;
    let (expected, got) = (sha256(&bytes), sha256(&wrong));
    let (cache, served) = (Cache::new(), wrong.clone());
    let server = faulty(one_file(&bytes), move |_, r, _| ranged(&served, r.from()));
    let words = ["user/model/m-Q4_K_M.gguf", "SHA-256", &expected, &got];
    refused(fetch(&cache.hub(&server), "user/model"), &words);
    assert!(!cache.blob(&bytes).exists() && !cache.incomplete(&bytes).exists());
    assert!(!cache.repo().join("snapshots").exists());
    // A beginning that another program spoilt is found, too, and the next try is whole.
    let right = faulty(one_file(&bytes), |_, _, reply| reply);
    fs::write(cache.incomplete(&bytes), vec![0; 100]).unwrap();
    refused(fetch(&cache.hub(&right), "user/model"), &["SHA-256", &expected]);
    assert_eq!(fs::read(fetch(&cache.hub(&right), "user/model").unwrap()).unwrap(), bytes);
}

#[test]
fn what_is_there_in_full_is_only_checked() {
    let bytes = content(50_000, 7);
    let (cache, server) = (Cache::new(), faulty(one_file(&bytes), |_, _, reply| reply));
    fs::create_dir_all(cache.repo().join("blobs")).unwrap();
    fs::write(cache.incomplete(&bytes), &bytes).unwrap();
    let path = fetch(&cache.hub(&server), "user/model").unwrap();
    assert_eq!(fs::read(&path).unwrap(), bytes);
    assert_eq!(server.resolved().len(), 0);
    // A blob that lost its end is none; nor is an unfinished file that is too long.
    fs::write(cache.blob(&bytes), &bytes[..10]).unwrap();
    fs::write(cache.incomplete(&bytes), vec![0; 60_000]).unwrap();
    assert_eq!(fs::read(fetch(&cache.hub(&server), "user/model").unwrap()).unwrap(), bytes);
    assert_eq!(server.resolved().len(), 1);
}

#[test]
fn refusals_are_final_and_say_what_to_do() {
    let cases: &[(u16, &[&str])] = &[
        (401, &["user/model", "refused the token"]),
        (403, &["user/model", "access denied", "terms", "/user/model"]),
        (404, &["user/model", "not found", "check the name"]),
        (418, &["418"]),
    ];
    for (status, words) in cases {
        let status = *status;
        let server = Server::new(move |_| Reply::new(status, "{}"));
        refused(fetch(&Cache::new().hub(&server), "user/model"), words);
        assert_eq!(server.requests().len(), 1, "{status}");
    }
    // Without a token, 401 is also what the hub says of a name that does not exist.
    let server = Server::new(|_| Reply::new(401, "").with("X-Error-Message", "Repo is gone"));
    let cache = Cache::new();
    let mut config = cache.config(&server.url());
    config.token = None;
    let words = ["no such repository", "--hf-token", "HF_TOKEN", "(Repo is gone)"];
    refused(fetch(&Hub::new(config), "user/model"), &words);
    assert!(server.requests()[0].header("authorization").is_none());
}

#[test]
fn a_busy_server_is_asked_again() {
    let bytes = content(10_000, 8);
    let repo = one_file(&bytes);
    let n = AtomicUsize::new(0);
    let server = Server::new(move |request| match n.fetch_add(1, Ordering::SeqCst) {
        0 => Reply::new(429, "").with("Retry-After", "1"),
        2 | 4 => Reply::new(503, ""),
        5 => Reply::new(500, ""),
        _ => repo.answer(request),
    });
    let cache = Cache::new();
    assert_eq!(fs::read(fetch(&cache.hub(&server), "user/model").unwrap()).unwrap(), bytes);
    assert_eq!(server.requests().len(), 7);
    // But not for ever.
    let server = Server::new(|_| Reply::new(503, ""));
    refused(fetch(&Cache::new().hub(&server), "user/model"), &["503"]);
    assert_eq!(server.requests().len(), 3);
    // What the cache has is taken then, and at once.
    let path = fetch(&cache.hub(&server), "user/model:q4_k_m").unwrap();
    assert_eq!(server.requests().len(), 4);
    assert_eq!(fs::read(path).unwrap(), bytes);
    refused(fetch(&cache.hub(&server), "user/model:Q8_0"), &["503"]);
}

#[test]
fn a_stalled_connection_is_given_up() {
    let bytes = content(50_000, 9);
    let stall = |n, _: &Request, reply: Reply| match n {
        0 => Reply { stall: true, ..reply.cut(10_000) },
        _ => reply,
    };
    let (cache, server) = (Cache::new(), faulty(one_file(&bytes), stall));
    let start = std::time::Instant::now();
    assert_eq!(fs::read(fetch(&cache.hub(&server), "user/model").unwrap()).unwrap(), bytes);
    assert_eq!(server.resolved()[1].from(), 10_000);
    assert!(start.elapsed().as_secs() < 15, "the server would have held it for 20 s");
}

#[test]
fn a_server_that_is_not_there_is_named() {
    let url = Server::new(|_| Reply::new(200, "")).url();
    let cache = Cache::new();
    refused(fetch(&Hub::new(cache.config(&url)), "user/model"), &["127.0.0.1"]);
}

#[test]
fn the_token_stays_with_its_host() {
    let bytes = content(20_000, 10);
    let served = bytes.clone();
    let storage = Server::new(move |request| match request.from() {
        0 => Reply::new(200, served.clone()).cut(5_000),
        from => ranged(&served, from),
    });
    let target = storage.other_url();
    let away = move |_, request: &Request, _| match request.path.contains("moved") {
        true => Reply::new(302, "").with("Location", format!("{target}/b?Signature=s")),
        false => Reply::new(307, "").with("Location", "/moved/resolve/x"),
    };
    let (cache, server) = (Cache::new(), faulty(one_file(&bytes), away));
    assert_eq!(fs::read(fetch(&cache.hub(&server), "user/model").unwrap()).unwrap(), bytes);
    let authorized = format!("Bearer {TOKEN}");
    for request in server.requests() {
        assert_eq!(request.header("authorization"), Some(authorized.as_str()), "{}", request.path);
    }
    let stored = storage.requests();
    assert_eq!(stored.iter().map(Request::from).collect::<Vec<_>>(), [0, 5_000]);
    assert!(
        stored.iter().all(|r| r.header("authorization").is_none() && r.path == "/b?Signature=s")
    );
}

#[test]
fn another_port_is_another_host() {
    let bytes = content(2_000, 11);
    let served = bytes.clone();
    let storage = Server::new(move |_| Reply::new(200, served.clone()));
    let target = storage.url();
    let away = move |_, _: &Request, _| Reply::new(302, "").with("Location", &target);
    let (cache, server) = (Cache::new(), faulty(one_file(&bytes), away));
    fetch(&cache.hub(&server), "user/model").unwrap();
    assert!(storage.requests()[0].header("authorization").is_none());
}

#[test]
fn redirects_that_lead_nowhere_end() {
    let round = |_: &Request| Reply::new(302, "").with("Location", "/again");
    let server = Server::new(round);
    refused(fetch(&Cache::new().hub(&server), "user/model"), &["redirects"]);
    assert_eq!(server.requests().len(), 11);
    for to in ["file:///etc/passwd", "", "ftp://x/y"] {
        let server = Server::new(move |_| Reply::new(302, "").with("Location", to));
        refused(fetch(&Cache::new().hub(&server), "user/model"), &["cannot be followed"]);
    }
}

#[test]
fn a_split_model_comes_whole_or_not_at_all() {
    let (a, b, other) = (content(9_000, 12), content(8_000, 13), content(10, 14));
    let repo = Repo::new(&[
        ("BF16/m-BF16-00001-of-00002.gguf", &a),
        ("BF16/m-BF16-00002-of-00002.gguf", &b),
        ("m-Q8_0.gguf", &other),
        ("m-Q2_K-00001-of-00002.gguf", &other),
    ]);
    let server = Server::new(move |request| repo.answer(request));
    let (cache, mut totals) = (Cache::new(), Vec::new());
    let hub = cache.hub(&server);
    let path = hub.fetch(&wanted("user/model:bf16"), &mut |s| {
        totals.push(s.total);
        Ok(())
    });
    let path = path.unwrap();
    assert!(path.ends_with("BF16/m-BF16-00001-of-00002.gguf"), "{path:?}");
    assert_eq!(fs::read(&path).unwrap(), a);
    assert_eq!(fs::read(path.with_file_name("m-BF16-00002-of-00002.gguf")).unwrap(), b);
    assert!(totals.iter().all(|total| *total == 17_000), "{totals:?}");
    assert_eq!(server.resolved().len(), 2);
    refused(fetch(&hub, "user/model:q2_k"), &["m-Q2_K-00002-of-00002.gguf"]);
    let words = ["user/model:Q5_K_M", "BF16/m-BF16-00001-of-00002.gguf", "m-Q8_0.gguf"];
    refused(fetch(&hub, "user/model:Q5_K_M"), &words);
    // Without a shard the cache does not have the model, whatever else it has.
    fs::remove_file(path.with_file_name("m-BF16-00002-of-00002.gguf")).unwrap();
    let mut config = cache.config(&server.url());
    config.offline = true;
    refused(fetch(&Hub::new(config), "user/model:BF16"), &["lacks", "00002-of-00002"]);
    // The blob is still there: the link comes back without a download.
    assert_eq!(fetch(&hub, "user/model:BF16").unwrap(), path);
    assert_eq!(server.resolved().len(), 2);
}

#[test]
fn offline_sends_no_requests() {
    let bytes = content(5_000, 15);
    let (cache, server) = (Cache::new(), faulty(one_file(&bytes), |_, _, reply| reply));
    let mut config = cache.config(&server.url());
    config.offline = true;
    let offline = Hub::new(config);
    refused(fetch(&offline, "user/model"), &["user/model", "--offline"]);
    assert!(server.requests().is_empty());
    let path = fetch(&cache.hub(&server), "user/model").unwrap();
    let n = server.requests().len();
    assert_eq!(fetch(&offline, "user/model").unwrap(), path);
    let file = wanted("user/model").with_file(FILE).unwrap();
    assert_eq!(offline.fetch(&file, &mut |_| Ok(())).unwrap(), path);
    refused(fetch(&offline, "user/model:Q8_0"), &["the cache has m-Q4_K_M.gguf"]);
    assert_eq!(server.requests().len(), n);
}

#[test]
fn two_at_once_download_once() {
    let bytes = content(60_000, 16);
    let slow =
        |_, _: &Request, reply| Reply { delay: std::time::Duration::from_millis(10), ..reply };
    let (cache, server) = (Cache::new(), faulty(one_file(&bytes), slow));
    let paths: Vec<_> = std::thread::scope(|scope| {
        let fetch = || scope.spawn(|| fetch(&cache.hub(&server), "user/model").unwrap());
        let all = [fetch(), fetch(), fetch()];
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    assert!(paths.iter().all(|path| fs::read(path).unwrap() == bytes));
    assert_eq!(server.resolved().len(), 1);
}

#[test]
fn names_that_lead_out_of_the_cache_lead_nowhere() {
    let bytes = content(100, 17);
    for name in ["../../../../evil-Q4_K_M.gguf", "/evil-Q4_K_M.gguf", "a/../../evil-Q4_K_M.gguf"] {
        let (cache, repo) = (Cache::new(), Repo::new(&[(name, &bytes)]));
        let server = Server::new(move |request| repo.answer(request));
        refused(fetch(&cache.hub(&server), "user/model"), &["no GGUF file"]);
        assert!(cache.tree().is_empty() && server.resolved().is_empty(), "{name}");
    }
    // Nor does a commit or the name of a content.
    for (key, value) in [("sha", "../../../../evil"), ("sha", "main"), ("id", "x")] {
        let server = Server::new(move |_| Reply::new(200, format!(r#"{{"{key}": "{value}"}}"#)));
        refused(fetch(&Cache::new().hub(&server), "user/model"), &["sha", "40 hexadecimal"]);
    }
    let mut tree = one_file(&bytes).tree();
    tree[0]["lfs"]["oid"] = "../../../../../evil".into();
    let (cache, repo) = (Cache::new(), one_file(&bytes));
    let server = Server::new(move |request| match request.path.contains("/tree/") {
        true => Reply::new(200, tree.to_string()),
        false => repo.answer(request),
    });
    refused(fetch(&cache.hub(&server), "user/model"), &["no GGUF file"]);
    assert!(cache.tree().is_empty());
}

#[test]
fn lengths_that_are_wrong_or_missing() {
    let bytes = content(30_000, 18);
    let served = bytes.clone();
    let replies: [(&str, Box<dyn Fn() -> Reply + Send + Sync>); 4] = [
        ("", Box::new(move || Reply { chunked: true, ..Reply::new(200, served.clone()) })),
        ("length: expected 30000 bytes, got 9223372036854775807", {
            let huge = i64::MAX;
            Box::new(move || Reply::new(200, "x").with("Content-Length", huge))
        }),
        ("length: expected 30000 bytes, got 7", Box::new(|| Reply::new(200, "0123456"))),
        ("length: expected 30000 bytes, got more", {
            Box::new(|| Reply { chunked: true, ..Reply::new(200, vec![0; 31_000]) })
        }),
    ];
    for (expected, reply) in replies {
        let (cache, server) = (Cache::new(), faulty(one_file(&bytes), move |_, _, _| reply()));
        let result = fetch(&cache.hub(&server), "user/model");
        match expected {
            "" => assert_eq!(fs::read(result.unwrap()).unwrap(), bytes),
            words => drop(refused(result, &[words])),
        }
        assert_eq!(server.resolved().len(), 1, "{expected}");
    }
    // A length that is no number, and one that no body follows, may have been a slip.
    let slips = |n, _: &Request, reply: Reply| match n {
        0 => Reply::new(200, "x").with("Content-Length", "99999999999999999999999"),
        1 => Reply { chunked: true, ..Reply::new(200, &reply.body[..10_000]) },
        _ => reply,
    };
    let (cache, server) = (Cache::new(), faulty(one_file(&bytes), slips));
    assert_eq!(fs::read(fetch(&cache.hub(&server), "user/model").unwrap()).unwrap(), bytes);
    assert_eq!(server.resolved()[2].from(), 10_000);
}

#[test]
fn a_mirror_may_list_neither_size_nor_checksum() {
    let bytes = content(30_000, 19);
    let tree = |repo: &Repo| {
        let mut tree = repo.tree();
        let file = tree[0].as_object_mut().unwrap();
        file.remove("lfs");
        file.remove("size");
        tree.to_string()
    };
    let serve = |linked: String| {
        let (repo, listing, n) = (one_file(&bytes), tree(&one_file(&bytes)), AtomicUsize::new(0));
        Server::new(move |request| match request.path.contains("/tree/") {
            true => Reply::new(200, listing.clone()),
            false if request.is_resolve() => {
                let reply = repo.answer(request).with("X-Linked-Etag", format!("\"{linked}\""));
                if n.fetch_add(1, Ordering::SeqCst) == 0 { reply.cut(9_000) } else { reply }
            }
            false => repo.answer(request),
        })
    };
    let (cache, server) = (Cache::new(), serve(sha256(&bytes)));
    assert_eq!(fs::read(fetch(&cache.hub(&server), "user/model").unwrap()).unwrap(), bytes);
    assert_eq!(server.resolved()[1].from(), 9_000);
    assert!(cache.repo().join("blobs").join("1".repeat(40)).exists(), "named by Git's own hash");
    let other = sha256(b"another");
    let words = ["SHA-256", &other, &sha256(&bytes)];
    refused(fetch(&Cache::new().hub(&serve(other.clone())), "user/model"), &words);
}

#[test]
fn listings_have_pages() {
    let bytes = content(1_000, 20);
    let (first, second) = (Repo::new(&[("README.md", b"x")]), one_file(&bytes));
    let listing = first.tree().to_string();
    let server = Server::new(move |request| {
        let host = request.header("host").unwrap();
        let link = format!("<http://{host}{}&cursor=2>; rel=\"next\"", request.path);
        match request.path.contains("/tree/") && !request.path.contains("cursor") {
            true => Reply::new(200, listing.clone()).with("Link", link),
            false => second.answer(request),
        }
    });
    assert_eq!(fs::read(fetch(&Cache::new().hub(&server), "user/model").unwrap()).unwrap(), bytes);
    // A list without an end, and a next page on another host, which would hear the token.
    let listing = first.tree().to_string();
    let endless = Server::new(move |request| match request.path.contains("/tree/") {
        true => Reply::new(200, listing.clone()).with("Link", "</a/tree/b>; rel=\"next\""),
        false => first.answer(request),
    });
    refused(fetch(&Cache::new().hub(&endless), "user/model"), &["does not end"]);
    assert!(endless.requests().len() <= 102);
    let (spy, repo) = (Server::new(|_| Reply::new(200, "[]")), one_file(&bytes));
    let link = format!("<{}/tree/>; rel=\"next\"", spy.url());
    let server = Server::new(move |request| repo.answer(request).with("Link", &link));
    fetch(&Cache::new().hub(&server), "user/model").unwrap();
    assert!(spy.requests().is_empty());
}

#[test]
fn a_new_commit_brings_what_changed_only() {
    let (same, old, new) = (content(4_000, 21), content(3_000, 22), content(3_500, 23));
    let other = "f".repeat(40);
    let serve = |q4: &[u8], commit: String| {
        let repo = Repo::new(&[(FILE, q4), ("m-Q8_0.gguf", &same)]);
        Server::new(move |request| {
            let asked = Request { path: request.path.replace(&commit, COMMIT), ..request.clone() };
            let mut reply = repo.answer(&asked);
            if !request.is_resolve() {
                let text = String::from_utf8(reply.body).unwrap().replace(COMMIT, &commit);
                reply.body = text.into();
            }
            reply
        })
    };
    let cache = Cache::new();
    let before = serve(&old, COMMIT.into());
    fetch(&cache.hub(&before), "user/model:Q8_0").unwrap();
    let first = fetch(&cache.hub(&before), "user/model").unwrap();
    let after = serve(&new, other.clone());
    let second = fetch(&cache.hub(&after), "user/model").unwrap();
    assert_eq!((fs::read(&first).unwrap(), fs::read(&second).unwrap()), (old, new));
    assert!(second.starts_with(cache.repo().join("snapshots").join(&other)));
    fetch(&cache.hub(&after), "user/model:Q8_0").unwrap();
    assert_eq!(after.resolved().len(), 1, "the other file is the same blob");
}

#[test]
fn what_the_cache_has_can_be_listed_and_removed() {
    let (a, b, q8) = (content(900, 24), content(800, 25), content(700, 26));
    let repo = Repo::new(&[
        ("m-BF16-00001-of-00002.gguf", &a),
        ("m-BF16-00002-of-00002.gguf", &b),
        ("m-Q8_0.gguf", &q8),
    ]);
    let server = Server::new(move |request| repo.answer(request));
    let cache = Cache::new();
    let hub = cache.hub(&server);
    assert!(hub.list().unwrap().is_empty());
    let bf16 = fetch(&hub, "user/model:BF16").unwrap();
    fetch(&hub, "user/model:Q8_0").unwrap();
    let listed = hub.list().unwrap();
    let shown: Vec<_> = listed.iter().map(|c| (c.quant.as_deref().unwrap(), c.n_bytes)).collect();
    assert_eq!(shown, [("BF16", 1_700), ("Q8_0", 700)]);
    assert_eq!((&listed[0].path, &listed[0].repo), (&bf16, &RepoId::parse("user/model").unwrap()));
    assert!(
        hub.remove(&wanted("user/model:Q4_0")).unwrap_err().to_string().contains("m-Q8_0.gguf")
    );
    assert!(hub.remove(&wanted("user/other")).is_err());
    assert_eq!(hub.remove(&wanted("user/model:bf16")).unwrap(), 1_700);
    assert!(!cache.blob(&a).exists() && !bf16.exists() && cache.blob(&q8).exists());
    assert_eq!(hub.list().unwrap().len(), 1);
    assert_eq!(hub.remove(&wanted("user/model:q8_0")).unwrap(), 700);
    let snapshots = fs::read_dir(cache.repo().join("snapshots")).unwrap();
    assert_eq!((hub.list().unwrap().len(), snapshots.count()), (0, 0));
    fetch(&hub, "user/model:Q8_0").unwrap();
    assert!(hub.remove(&wanted("user/model")).unwrap() >= 700);
    assert!(!cache.repo().exists());
    assert!(hub.remove(&wanted("user/model:Q8_0")).is_err());
}

#[test]
fn disks_that_are_full_or_closed_are_said() {
    let bytes = content(5_000, 27);
    let serve = || faulty(one_file(&bytes), |_, _, reply| reply);
    // A file that takes no byte.
    let (cache, server) = (Cache::new(), serve());
    fs::create_dir_all(cache.repo().join("blobs")).unwrap();
    std::os::unix::fs::symlink("/dev/full", cache.incomplete(&bytes)).unwrap();
    let words = [".incomplete", "no space left on the disk after 0 bytes"];
    refused(fetch(&cache.hub(&server), "user/model"), &words);
    // A cache that is no folder.
    let (cache, server) = (Cache::new(), serve());
    fs::write(cache.path(), "").unwrap();
    refused(fetch(&cache.hub(&server), "user/model"), &["hub", "Not a directory"]);
    // More than any disk holds is refused before the first byte.
    let mut tree = one_file(&bytes).tree();
    tree[0]["lfs"]["size"] = (1u64 << 60).into();
    let repo = one_file(&bytes);
    let server = Server::new(move |request| match request.path.contains("/tree/") {
        true => Reply::new(200, tree.to_string()),
        false => repo.answer(request),
    });
    let cache = Cache::new();
    refused(fetch(&cache.hub(&server), "user/model"), &["the disk has room for", "1048576.00 TiB"]);
    assert!(server.resolved().is_empty());
}
