//! Files that commands write: what they must not replace, by whatever name, and what they may.
//! Most inputs here are no models: a collision is found before anything is opened.
#![cfg(target_os = "linux")]

use common::cli::{Tiny, failed, moeba, stderr, stdout, succeeded, write_tiny};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Command, Output};

/// A file of each kind that commands write, as it begins.
const KINDS: [(&str, &[u8]); 8] = [
    ("gguf", b"GGUF\x03\0\0\0"),
    ("npy", b"\x93NUMPY\x01\0"),
    ("trace", b"MOEBATRC"),
    ("profile", b"MOEBAPRO"),
    ("stats", b"{\"peak_rss_bytes\": 1}"),
    ("log", b"moeba 0.1.0\n"),
    ("accuracies", b"layer;predictor;measure;value\n"),
    ("text", b"Notes of a year.\n"),
];

/// A command with `OUT` where the file to write is named, what it writes, and what it reads.
struct Case {
    args: &'static [&'static str],
    kind: &'static str,
    reads: &'static [&'static str],
}

const CASES: &[Case] = &[
    Case {
        args: &["run", "m.gguf", "-f", "in.txt", "--stats", "OUT"],
        kind: "stats",
        reads: &["m.gguf", "in.txt"],
    },
    Case {
        args: &["run", "m.gguf", "-p", "x", "--chat-template", "in.txt", "--log-file", "OUT"],
        kind: "log",
        reads: &["m.gguf", "in.txt"],
    },
    Case {
        args: &["run", "m.gguf", "-f", "in.txt", "--profile", "OUT"],
        kind: "profile",
        reads: &["m.gguf", "in.txt"],
    },
    Case {
        args: &["perplexity", "m.gguf", "-f", "in.txt", "--stats", "OUT"],
        kind: "stats",
        reads: &["m.gguf", "in.txt"],
    },
    Case {
        args: &["logits", "m.gguf", "--tokens", "1", "-o", "OUT"],
        kind: "npy",
        reads: &["m.gguf"],
    },
    Case {
        args: &["logits", "m.gguf", "--tokens", "1", "-o", "new.npy", "--experts", "OUT"],
        kind: "npy",
        reads: &["m.gguf"],
    },
    Case {
        args: &["convert", "hf", "-o", "OUT"],
        kind: "gguf",
        reads: &["hf/config.json", "hf/model-00001-of-00002.safetensors", "hf/blob"],
    },
    Case {
        args: &["quantize", "m.gguf", "OUT", "q8_0", "--imatrix", "im.gguf"],
        kind: "gguf",
        reads: &["m.gguf", "im.gguf"],
    },
    Case {
        args: &["quantize", "s-00001-of-00002.gguf", "OUT", "copy"],
        kind: "gguf",
        reads: &["s-00001-of-00002.gguf", "s-00002-of-00002.gguf"],
    },
    Case {
        args: &["synth", "qwen3-30b-a3b", "--layers", "1", "-o", "OUT"],
        kind: "gguf",
        reads: &[],
    },
    Case {
        args: &["trace", "record", "m.gguf", "-f", "in.txt", "-o", "OUT"],
        kind: "trace",
        reads: &["m.gguf", "in.txt"],
    },
    Case {
        args: &["trace", "import", "routing.csv", "-o", "OUT"],
        kind: "trace",
        reads: &["routing.csv"],
    },
    Case {
        args: &["trace", "train", "t.mtrace", "-o", "OUT"],
        kind: "profile",
        reads: &["t.mtrace"],
    },
    Case {
        args: &["trace", "train", "t.mtrace", "-o", "new.moeba", "--report", "OUT"],
        kind: "accuracies",
        reads: &["t.mtrace"],
    },
    Case {
        args: &["trace", "replay", "t.mtrace", "--gguf", "m.gguf", "--log-file", "OUT"],
        kind: "log",
        reads: &["t.mtrace", "m.gguf"],
    },
    Case { args: &["bench", "m.gguf", "--log-file", "OUT"], kind: "log", reads: &["m.gguf"] },
    Case { args: &["bench", "m.gguf", "--profile", "OUT"], kind: "profile", reads: &["m.gguf"] },
    Case { args: &["doctor", "m.gguf", "--log-file", "OUT"], kind: "log", reads: &["m.gguf"] },
    Case {
        args: &["render", "m.gguf", "messages.json", "--log-file", "OUT"],
        kind: "log",
        reads: &["m.gguf", "messages.json"],
    },
    Case { args: &["pull", "a/b", "--offline", "--log-file", "OUT"], kind: "log", reads: &[] },
];

impl Case {
    fn named(&self) -> String {
        self.args.join(" ")
    }

    fn command(&self, bed: &Bed, out: &str, more: &[&str]) -> Command {
        let mut command = bed.moeba();
        command.args(self.args.iter().map(|arg| if *arg == "OUT" { out } else { arg }));
        command.args(more);
        command
    }
}

/// A folder with everything that `CASES` read.
struct Bed {
    dir: tempfile::TempDir,
}

impl Bed {
    fn new() -> Bed {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let write = |name: &str, bytes: &[u8]| fs::write(path(name), bytes).unwrap();
        for folder in ["hf", "old", "folder", "blobs"] {
            fs::create_dir(path(folder)).unwrap();
        }
        for name in ["m", "im", "s-00001-of-00002", "s-00002-of-00002"] {
            write(&format!("{name}.gguf"), format!("GGUF {name}").as_bytes());
        }
        write("in.txt", b"A prompt.");
        write("t.mtrace", b"MOEBATRC trace");
        write("routing.csv", b"0,1\n1,0\n");
        write("messages.json", b"[]");
        write("hf/config.json", b"{}");
        write("hf/model-00001-of-00002.safetensors", b"weights");
        // As the hub's cache has them.
        write("blobs/1234", b"more weights");
        symlink(path("blobs/1234"), path("hf/blob")).unwrap();
        for (kind, bytes) in KINDS {
            write(&format!("old/{kind}"), bytes);
        }
        Bed { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The program in the folder, so that names are short.
    fn moeba(&self) -> Command {
        let mut command = moeba();
        command.current_dir(self.dir.path()).env("HF_HOME", self.path("hub"));
        command.env_remove("HF_HUB_CACHE");
        command
    }

    /// Every file's bytes, by its name; links by where they lead.
    fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let (mut files, mut folders) = (BTreeMap::new(), vec![self.dir.path().to_owned()]);
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).unwrap() {
                let path = entry.unwrap().path();
                match fs::read_link(&path) {
                    Ok(target) => {
                        drop(files.insert(path, target.into_os_string().into_encoded_bytes()))
                    }
                    Err(_) if path.is_dir() => folders.push(path),
                    Err(_) => drop(files.insert(path.clone(), fs::read(&path).unwrap())),
                }
            }
        }
        files
    }

    /// The command fails with one sentence, writes nothing to stdout and changes no file.
    #[track_caller]
    fn refused(&self, command: &mut Command, code: i32, words: &[&str]) {
        let before = self.files();
        let out = command.output().unwrap();
        let shown = format!("{command:?}: {}", stderr(&out));
        assert_eq!(out.status.code(), Some(code), "{shown}");
        assert_eq!(stderr(&out).lines().count(), 1, "{shown}");
        words.iter().for_each(|word| assert!(shown.contains(word), "no {word:?} in {shown}"));
        assert!(!shown.contains("os error") && !shown.contains(".part"), "{shown}");
        assert!(out.stdout.is_empty(), "{shown}");
        assert!(self.files() == before, "files have changed: {shown}");
    }
}

/// Other names of a file: relative, absolute, through links and through folders.
fn names(bed: &Bed, file: &str) -> Vec<String> {
    let absolute = bed.path(file);
    let name = absolute.file_name().unwrap().to_str().unwrap().to_owned();
    let (link, hard) = (bed.path("link"), bed.path("hard"));
    for path in [&link, &hard, &bed.path("linked")] {
        let _ = fs::remove_file(path);
    }
    symlink(&absolute, &link).unwrap();
    fs::hard_link(absolute.canonicalize().unwrap(), &hard).unwrap();
    symlink(absolute.parent().unwrap(), bed.path("linked")).unwrap();
    vec![
        file.into(),
        format!("./{file}"),
        format!("folder/../{file}"),
        absolute.display().to_string(),
        "link".into(),
        "hard".into(),
        format!("linked/{name}"),
    ]
}

#[test]
fn an_output_never_replaces_an_input_by_whatever_name() {
    let bed = Bed::new();
    for case in CASES {
        for input in case.reads {
            for (i, name) in names(&bed, input).iter().enumerate() {
                // With --force as well.
                let more: &[&str] = if i % 2 == 0 { &["--force"] } else { &[] };
                let words = ["would replace", "name another file", name.as_str()];
                bed.refused(&mut case.command(&bed, name, more), 2, &words);
            }
        }
    }
}

#[test]
fn an_output_does_not_replace_a_file_of_another_kind() {
    let bed = Bed::new();
    for case in CASES {
        for (kind, _) in KINDS.iter().filter(|(kind, _)| *kind != case.kind) {
            let out = format!("old/{kind}");
            let words = [out.as_str(), "not replaced", "name another file"];
            bed.refused(&mut case.command(&bed, &out, &[]), 1, &words);
        }
        // These would do their work.
        if case.args[0] == "doctor" || case.args[0] == "synth" {
            continue;
        }
        // What is wrong with the inputs is found later.
        let out = case.command(&bed, &format!("old/{}", case.kind), &[]).output().unwrap();
        assert!(!stderr(&out).contains("not replaced"), "{}: {}", case.named(), stderr(&out));
        let old = bed.path("old").join(case.kind);
        fs::write(old, KINDS.iter().find(|(kind, _)| *kind == case.kind).unwrap().1).unwrap();
    }
}

#[test]
fn a_place_that_cannot_be_written_is_named_before_the_work() {
    let bed = Bed::new();
    for case in CASES {
        for (out, code, word) in [
            ("folder", 1, "this is a folder"),
            ("missing/out", 1, "there is no folder missing"),
            ("in.txt/out", 1, "in.txt is not a folder"),
        ] {
            bed.refused(&mut case.command(&bed, out, &[]), code, &[out, word]);
        }
        // A profile may be one that is only read.
        if case.args[case.args.len() - 2] != "--profile" {
            let out = "/proc/moeba-out";
            bed.refused(&mut case.command(&bed, out, &[]), 1, &["/proc: "]);
        }
        if !["stats", "accuracies"].contains(&case.kind) {
            bed.refused(&mut case.command(&bed, "-", &[]), 2, &["needs a file"]);
        }
        if !["stats", "accuracies", "log"].contains(&case.kind) {
            let words = ["/dev/null: ", "regular file"];
            bed.refused(&mut case.command(&bed, "/dev/null", &[]), 1, &words);
        }
    }
}

#[test]
fn two_outputs_are_two_files() {
    let bed = Bed::new();
    symlink(bed.path("folder"), bed.path("linked")).unwrap();
    for case in CASES.iter().filter(|case| !case.args.contains(&"--log-file")) {
        for (a, b) in [("new", "./new"), ("folder/new", "linked/new"), ("old/text", "old/text")] {
            let mut command = case.command(&bed, a, &["--log-file", b]);
            bed.refused(&mut command, 2, &["name the same file"]);
        }
    }
    let mut logits = bed.moeba();
    logits.args(["logits", "m.gguf", "--tokens", "1", "-o", "x.npy", "--experts", "./x.npy"]);
    bed.refused(&mut logits, 2, &["--output and --experts name the same file"]);
}

#[test]
fn manual_pages_replace_only_manual_pages() {
    let bed = Bed::new();
    let pages = || {
        let mut command = bed.moeba();
        command.args(["man", "--dir", "folder"]);
        command
    };
    fs::write(bed.path("folder/moeba-run.1"), "my own\n").unwrap();
    bed.refused(&mut pages(), 1, &["moeba-run.1", "not replaced"]);
    fs::remove_file(bed.path("folder/moeba-run.1")).unwrap();
    for _ in 0..2 {
        assert!(pages().status().unwrap().success());
    }
    assert!(bed.path("folder/moeba-trace-record.1").exists());
}

#[test]
fn variables_streams_and_the_cache_of_a_hub_count_as_well() {
    let bed = Bed::new();
    for (name, out, word) in [
        ("MOEBA_PROFILE", "m.gguf", "--profile would replace MODEL"),
        ("MOEBA_LOG_FILE", "in.txt", "--log-file would replace --file"),
        ("LLAMA_ARG_LOG_FILE", "in.txt", "--log-file would replace --file"),
    ] {
        let mut command = bed.moeba();
        command.args(["run", "m.gguf", "-f", "in.txt"]).env(name, out);
        bed.refused(&mut command, 2, &[word]);
    }
    let mut model = bed.moeba();
    model.args(["run", "-p", "x", "--log-file", "m.gguf", "--force"]).env("MOEBA_MODEL", "m.gguf");
    bed.refused(&mut model, 2, &["would replace MODEL"]);

    let mut redirected = bed.moeba();
    redirected.args(["run", "m.gguf", "--stats", "in.txt", "--force"]);
    redirected.stdin(fs::File::open(bed.path("in.txt")).unwrap());
    bed.refused(&mut redirected, 2, &["would replace standard input"]);
    let mut redirected = bed.moeba();
    redirected.args(["run", "m.gguf", "-p", "x", "--stats", "answer", "--force"]);
    redirected.stdout(fs::File::create(bed.path("answer")).unwrap());
    bed.refused(&mut redirected, 2, &["would replace standard output"]);

    let blobs = bed.path("hub/hub/models--a--b/blobs");
    fs::create_dir_all(&blobs).unwrap();
    fs::write(blobs.join("12"), b"GGUF").unwrap();
    for model in [["run", "hf:a/b"].as_slice(), &["run", "-hf", "a/b"]] {
        let blob = blobs.join("12");
        let mut hub = bed.moeba();
        hub.args(model).args(["-p", "x", "--offline", "--force", "--stats"]).arg(blob);
        bed.refused(&mut hub, 2, &["would replace"]);
    }
}

/// A model that runs, in a folder with old files.
fn runs(bed: &Bed, args: &[&str]) -> Output {
    let mut command = bed.moeba();
    command.args(["run", "tiny.gguf", "-p", "hi", "-n", "6", "--temp", "0"]).args(args);
    command.output().unwrap()
}

fn running_bed() -> Bed {
    let bed = Bed::new();
    write_tiny(&bed.path("tiny.gguf"), Tiny::default());
    bed
}

fn is_stats(bytes: &[u8]) -> bool {
    serde_json::from_slice::<serde_json::Value>(bytes).is_ok_and(|v| v["n_ctx"].is_u64())
}

#[test]
fn files_of_the_same_kind_and_streams_are_written() {
    let bed = running_bed();
    let read = |name: &str| fs::read(bed.path(name)).unwrap();
    fs::write(bed.path("empty"), b"").unwrap();
    symlink(bed.path("old/stats"), bed.path("link")).unwrap();
    for name in ["old/stats", "empty", "new", "new", "link"] {
        succeeded(&runs(&bed, &["--stats", name, "--log-file", "old/log"]));
        assert!(is_stats(&read(name)), "{name}");
    }
    assert!(bed.path("link").is_symlink());
    let log = String::from_utf8(read("old/log")).unwrap();
    assert!(log.starts_with("moeba "), "{log}");
    // Forced.
    succeeded(&runs(&bed, &["--stats", "old/text", "--log-file", "old/npy", "--force"]));
    assert!(is_stats(&read("old/text")) && read("old/npy").starts_with(b"moeba "));

    let answer = stdout(&runs(&bed, &[])).to_owned();
    for stream in ["-", "/dev/stdout"] {
        let out = runs(&bed, &["--stats", stream]);
        let text = succeeded(&out).strip_prefix(&answer).unwrap();
        assert!(is_stats(text.as_bytes()), "{stream}: {text}");
    }
    // What stdout has by then stays, where a file is behind it.
    let mut command = bed.moeba();
    command.args(["run", "tiny.gguf", "-p", "hi", "-n", "6", "--temp", "0"]);
    command.args(["--stats", "/dev/stdout", "--log-file", "/dev/null"]);
    let status = command.stdout(fs::File::create(bed.path("answer")).unwrap()).status().unwrap();
    assert!(status.success());
    let text = String::from_utf8(read("answer")).unwrap();
    assert!(is_stats(text.strip_prefix(&answer).unwrap().as_bytes()), "{text}");
    assert!(!bed.path("-").exists());
    succeeded(&runs(&bed, &["--stats", "./-"]));
    assert!(is_stats(&read("-")));
}

#[test]
fn a_profile_that_is_not_the_models_is_refused_before_the_answer() {
    let bed = Bed::new();
    symlink(
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("models/demo/moeba-demo.gguf"),
        bed.path("tiny.gguf"),
    )
    .unwrap();
    let args =
        |profile: &'static str| ["--ram", "50%", "--policy", "finemoe", "--profile", profile];
    succeeded(&runs(&bed, &args("own.moeba")));
    let own = fs::read(bed.path("own.moeba")).unwrap();
    let mut damaged = own.clone();
    damaged[20] ^= 1;
    // The key is before the sections; the last bytes are a checksum.
    let mut others = own[..own.len() - 4].to_vec();
    others[12] ^= 1;
    others.extend(crc32fast::hash(&others).to_le_bytes());
    for (bytes, why) in [
        (damaged, "a damaged profile"),
        (others, "the profile of another model"),
        (own[..own.len() / 2].to_vec(), "a damaged profile"),
    ] {
        for more in [[].as_slice(), &["--force"]] {
            fs::write(bed.path("own.moeba"), &bytes).unwrap();
            let out = runs(&bed, &[&args("own.moeba"), more].concat());
            failed(&out, 1, &["own.moeba: ", why, "--profile"]);
            assert!(out.stdout.is_empty());
            assert_eq!(fs::read(bed.path("own.moeba")).unwrap(), bytes);
        }
        // The default was not named: it stays, and the answer comes.
        let beside = bed.path("tiny.gguf.moeba");
        fs::write(&beside, &bytes).unwrap();
        let out = runs(&bed, &args("auto"));
        succeeded(&out);
        assert!(stderr(&out).contains(why) && stderr(&out).contains("neither used nor replaced"));
        assert_eq!(fs::read(&beside).unwrap(), bytes);
    }
    fs::write(bed.path("tiny.gguf.moeba"), "notes").unwrap();
    succeeded(&runs(&bed, &args("auto")));
    assert_eq!(fs::read(bed.path("tiny.gguf.moeba")).unwrap(), b"notes");
}

#[test]
fn messages_of_the_system_have_no_numbers_and_no_temporary_names() {
    let bed = running_bed();
    let file = bed.path("zero");
    fs::write(&file, b"").unwrap();
    let mut quantize = bed.moeba();
    quantize.args(["quantize", "tiny.gguf", "out.gguf", "q4_0", "--imatrix", "zero"]);
    bed.refused(&mut quantize, 1, &["zero: ", "an importance matrix", "fewer than 4 bytes"]);
    let mut missing = bed.moeba();
    missing.args(["run", "tiny.gguf", "-f", "nothing.txt"]);
    let out = missing.output().unwrap();
    failed(&out, 1, &["error: nothing.txt: No such file or directory\n"]);
}
