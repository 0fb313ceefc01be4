//! `moeba serve --ray`: hands over to Python, which has Ray place, watch and restart servers on
//! several machines. The programs are in `server/ray`.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::sys::signal::SigSet;
use serde_json::{Value, json};

use super::values::Parsed;
use crate::{Error, Result, terminal};

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Several machines")]
pub struct RayArgs {
    /// Serve on every machine of a Ray cluster, or with Ray on this one; needs Python 3 and Ray
    #[arg(long)]
    ray: bool,
    /// Machines that serve: a number, or A..B as many requests come [default: all there are]
    #[arg(long, value_name = "N|A..B", value_parser = replicas, requires = "ray")]
    replicas: Option<Replicas>,
    /// Seconds until another machine serves, and until one less does
    #[arg(long, value_name = "UP,DOWN", value_parser = delays, requires = "ray")]
    #[arg(default_value = "30,600")]
    scale_delays: Delays,
    /// Serve on the cluster's head, and let its other machines compute experts (see moeba experts)
    #[arg(long, requires = "ray", conflicts_with = "replicas")]
    ray_peers: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Replicas {
    low: u32,
    high: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Delays {
    up: u32,
    down: u32,
}

fn replicas(text: &str) -> Parsed<Replicas> {
    let (low, high) = text.split_once("..").unwrap_or((text, text));
    match (low.parse(), high.parse()) {
        (Ok(low), Ok(high)) if (1..=high).contains(&low) && high <= 10_000 => {
            Ok(Replicas { low, high })
        }
        _ => Err("expected a number of machines, or two as in 1..8".into()),
    }
}

fn delays(text: &str) -> Parsed<Delays> {
    let numbers = text.split_once(',').map(|(up, down)| (up.parse(), down.parse()));
    match numbers {
        Some((Ok(up), Ok(down))) => Ok(Delays { up, down }),
        _ => Err("expected two numbers of seconds as in 30,600".into()),
    }
}

/// Texts at a time of a replica: they share its connections.
const MAX_PARALLEL: usize = 56;

/// Values of the other flags of `serve` that Ray's part of the work needs.
pub struct Served<'a> {
    pub host: &'a str,
    pub port: u16,
    /// A line for each key, as in a file of keys.
    pub keys: String,
    pub insecure: bool,
    pub parallel: usize,
    pub kv_unified: bool,
    pub n_queue: usize,
    /// Seconds; 0 is any time.
    pub queue_timeout: u64,
    pub grace: u64,
    /// Seconds of silence after which a stream shows that it lives.
    pub ping: i64,
    /// Whether a request without a seed has a random one.
    pub has_random_seeds: bool,
    pub ready_file: Option<&'a Path>,
    /// Arguments of `moeba experts` for the same model.
    pub of_peers: Vec<String>,
}

impl RayArgs {
    pub fn is_on(&self) -> bool {
        self.ray
    }

    /// Becomes the program that deploys servers. Returns only if it cannot.
    pub fn run(&self, served: &Served) -> Result<()> {
        if served.parallel > MAX_PARALLEL {
            let why = format!("--parallel: with --ray a machine has at most {MAX_PARALLEL} texts");
            return Err(Error::Usage(why));
        }
        let python = python()?;
        let folder = tempfile::Builder::new().prefix("moeba-ray-").tempdir();
        let folder = folder.map_err(|e| Error::io(std::env::temp_dir(), e))?;
        for (name, text) in PROGRAMS {
            write(&folder.path().join(name), text)?;
        }
        write(&folder.path().join("settings.json"), &self.settings(served)?.to_string())?;
        // The programs remove the folder.
        let main = folder.keep().join("main.py");
        // Python has its own handlers, and blocked signals would stay blocked.
        let _ = SigSet::all().thread_unblock();
        let failed = Command::new(&python).arg(&main).stdin(Stdio::null()).exec();
        Err(Error::io(python, failed))
    }

    fn settings(&self, served: &Served) -> Result<Value> {
        let program = std::env::current_exe().map_err(|e| Error::io("moeba", e))?;
        let folder = std::env::current_dir().map_err(|e| Error::io(".", e))?;
        let mut arguments = of_child(std::env::args_os().skip(1))?;
        let parallel = served.parallel.to_string();
        // Where a flag is repeated, the last one counts.
        let last = ["--host", "127.0.0.1", "--port", "0", "--lifeline", "--parallel", &parallel];
        arguments.extend(last.map(str::to_owned));
        if served.kv_unified {
            arguments.push("--kv-unified".into());
        }
        Ok(json!({
            "program": program,
            "folder": folder,
            "arguments": arguments,
            "host": served.host,
            "port": served.port,
            "is_port_chosen": served.port == 0,
            "keys": served.keys,
            "insecure": served.insecure,
            "parallel": served.parallel,
            "queue": served.n_queue,
            "queue_timeout": served.queue_timeout,
            "grace": served.grace,
            "ping": if served.ping < 1 { 5 } else { served.ping.min(5) },
            "seeds": served.has_random_seeds,
            "peer_arguments": if self.ray_peers { &served.of_peers[..] } else { &[] },
            "replicas": self.replicas.map(|r| [r.low, r.high]),
            "scale_delays": [self.scale_delays.up, self.scale_delays.down],
            "ready_file": served.ready_file,
            "quiet": terminal::is_quiet(),
        }))
    }
}

/// The programs, which travel in this one.
const PROGRAMS: &[(&str, &str)] = &[
    ("main.py", include_str!("../server/ray/main.py")),
    ("api.py", include_str!("../server/ray/api.py")),
    ("peer.py", include_str!("../server/ray/peer.py")),
    ("conversation.py", include_str!("../server/ray/conversation.py")),
    ("exact.py", include_str!("../server/ray/exact.py")),
    ("registry.py", include_str!("../server/ray/registry.py")),
    ("replica.py", include_str!("../server/ray/replica.py")),
    ("router.py", include_str!("../server/ray/router.py")),
];

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).map_err(|e| Error::io(path, e))
}

/// Flags that are for the whole, each with whether it has a value.
const NOT_OF_CHILD: &[(&str, bool)] = &[
    ("--ray", false),
    ("--replicas", true),
    ("--scale-delays", true),
    ("--ray-peers", false),
    ("--api-key", true),
    ("--api-key-file", true),
    ("--ready-file", true),
    ("--log-file", true),
];

/// The arguments of the servers: this program's own but for what is not theirs.
fn of_child(arguments: impl Iterator<Item = OsString>) -> Result<Vec<String>> {
    let mut out = Vec::new();
    let mut skips = false;
    for argument in arguments {
        let argument = argument.into_string().map_err(|argument| {
            let shown = argument.to_string_lossy();
            Error::Usage(format!("{shown}: with --ray arguments must be UTF-8"))
        })?;
        if std::mem::take(&mut skips) {
            continue;
        }
        let name = argument.split_once('=').map_or(argument.as_str(), |(name, _)| name);
        match NOT_OF_CHILD.iter().find(|(flag, _)| *flag == name) {
            Some((_, has_value)) => skips = *has_value && name == argument,
            None => out.push(argument),
        }
    }
    Ok(out)
}

const INSTALL: &str = "pip install \"ray[serve]>=2.52,<3\"";

/// The first release whose routers, tokens and deployments are as they are used here.
const OLDEST: (u32, u32) = (2, 52);

/// Prints Ray's version, and the first package of `ray[serve]` that is missing.
const PROBE: &str = "\
import importlib.metadata as m, importlib.util as u
try: print(m.version('ray'))
except m.PackageNotFoundError: print()
print(next((p for p in ('aiohttp', 'starlette', 'uvicorn') if u.find_spec(p) is None), ''))";

/// A Python that has Ray.
fn python() -> Result<PathBuf> {
    let given = std::env::var_os("MOEBA_PYTHON").filter(|path| !path.is_empty());
    let path = PathBuf::from(given.unwrap_or_else(|| "python3".into()));
    let shown = path.display();
    let output = Command::new(&path).args(["-c", PROBE]).stdin(Stdio::null()).output();
    let output = output.map_err(|e| {
        let why = crate::error::sentence(&e);
        Error::invalid(format!(
            "--ray needs Python 3 with Ray, and {shown} cannot be started ({why}): install it, or \
             name a Python in MOEBA_PYTHON"
        ))
    })?;
    let text = String::from_utf8_lossy(&output.stdout);
    let mut lines = text.lines();
    let (version, missing) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
    check(version, missing, &shown.to_string())?;
    Ok(path)
}

/// Refuses a Python without Ray, or with one that is too old or too new.
fn check(version: &str, missing: &str, python: &str) -> Result<()> {
    let how = format!("{python} -m {INSTALL}");
    if version.is_empty() {
        return Err(Error::invalid(format!("--ray: {python} has no Ray: {how}")));
    }
    let mut parts = version.split('.').map_while(|part| part.parse::<u32>().ok());
    let (major, minor) = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
    if (major, minor) < OLDEST || major > OLDEST.0 {
        let age = if major > OLDEST.0 { "new" } else { "old" };
        return Err(Error::invalid(format!("--ray: Ray {version} is too {age}: {how}")));
    }
    match missing.is_empty() {
        true => Ok(()),
        false => Err(Error::invalid(format!("--ray: {python} has Ray but not {missing}: {how}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_machines_are_read() {
        assert_eq!(replicas("3"), Ok(Replicas { low: 3, high: 3 }));
        assert_eq!(replicas("1..8"), Ok(Replicas { low: 1, high: 8 }));
        for bad in ["", "0", "8..1", "1..", "..2", "a", "1..99999"] {
            assert!(replicas(bad).is_err(), "{bad}");
        }
        assert_eq!(delays("1,2"), Ok(Delays { up: 1, down: 2 }));
        assert!(delays("1").is_err() && delays("1,x").is_err());
    }

    #[test]
    fn children_get_the_arguments_that_are_theirs() {
        let line =
            "serve m.gguf --ray --replicas 1..2 -c 128 --api-key=K --api-key-file F --temp 1";
        let child = of_child(line.split(' ').map(OsString::from)).unwrap();
        assert_eq!(child.join(" "), "serve m.gguf -c 128 --temp 1");
    }

    #[test]
    fn a_python_without_ray_is_told_what_helps() {
        let why = |version, missing| check(version, missing, "python3").unwrap_err().to_string();
        for (version, missing, said) in [
            ("", "", "has no Ray"),
            ("2.9.3", "", "Ray 2.9.3 is too old"),
            ("3.0.0", "", "Ray 3.0.0 is too new"),
            ("2.60.0", "aiohttp", "not aiohttp"),
        ] {
            let why = why(version, missing);
            assert!(why.contains(said) && why.contains("-m pip install"), "{why}");
        }
        assert!(check("2.60.0", "", "python3").is_ok() && check("2.52.1", "", "").is_ok());
    }
}
