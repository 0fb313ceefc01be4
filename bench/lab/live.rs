//! Live runs of the engine, experts from disk: each policy answers requests at three budgets, with
//! a profile that grows from request to request, as a user's does. Policies run in turn.

use crate::papers::call;
use crate::tables::side_by_side_live::{DEFAULT, Live, beside_best};
use moeba::policy::PolicySpec;
use moeba::{Error, Result};
use serde_json::Value;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

/// Policies that a user names, and two of parts; the last is the default.
pub fn policies<'a>() -> Vec<&'a str> {
    let parts = ["predictor=next-layer,eviction=scan-resistant", DEFAULT];
    PolicySpec::names().chain(parts).collect()
}

/// Percent of the experts in memory.
const BUDGETS: [u32; 3] = [25, 50, 75];

/// Tokens of an answer, and characters of a prompt.
const N_ANSWER: &str = "128";
const N_PROMPT: usize = 1200;

pub struct LiveOptions<'a> {
    pub moeba: &'a Path,
    /// Requests are taken from it, from its start on.
    pub text: &'a str,
    /// For files that are made on the way.
    pub folder: &'a Path,
    /// Requests of each policy that are measured, and those before them that fill its profile.
    pub n_rounds: usize,
    pub n_warm_up: usize,
    pub policies: Vec<&'a str>,
}

/// The figures of one request.
#[derive(Clone, Copy, Debug)]
struct Request {
    tpot_ms: f64,
    ttft_ms: f64,
    hit_rate: f64,
    stall_ms: f64,
    mib: f64,
    policy_share: f64,
}

/// A line of `Live` for each model, budget and policy.
pub fn run(options: &LiveOptions, models: &[(String, PathBuf)]) -> Result<String> {
    let prompts = prompts(options.text, options.n_warm_up + options.n_rounds)?;
    let mut lines = String::new();
    for (name, path) in models {
        for budget in BUDGETS {
            let mut all = vec![Vec::new(); options.policies.len()];
            for (round, prompt) in prompts.iter().enumerate() {
                for (i, policy) in options.policies.iter().enumerate() {
                    let profile = options.folder.join(format!("{name}-{budget}-{i}.moeba"));
                    if round == 0 && profile.exists() {
                        fs::remove_file(&profile).map_err(|e| Error::io(&profile, e))?;
                    }
                    let request = request(options, path, policy, budget, &profile, prompt)?;
                    if round >= options.n_warm_up {
                        all[i].push(request);
                    }
                }
            }
            for (policy, requests) in options.policies.iter().zip(all) {
                lines.push_str(&line(name, policy, budget, requests));
            }
        }
    }
    Ok(lines)
}

/// Pieces of the text that begin with a paragraph.
fn prompts(text: &str, n: usize) -> Result<Vec<String>> {
    let mut prompts: Vec<String> = Vec::new();
    let mut piece = String::new();
    for paragraph in text.split("\n\n").filter(|paragraph| !paragraph.trim().is_empty()) {
        piece.push_str(paragraph);
        piece.push_str("\n\n");
        if piece.len() >= N_PROMPT {
            prompts.push(std::mem::take(&mut piece));
        }
    }
    match prompts.len() >= n {
        true => Ok(prompts.into_iter().take(n).collect()),
        false => Err(Error::Usage(format!(
            "--text has {} pieces of {N_PROMPT} characters, and {n} are needed",
            prompts.len()
        ))),
    }
}

fn request(
    options: &LiveOptions,
    model: &Path,
    policy: &str,
    budget: u32,
    profile: &Path,
    prompt: &str,
) -> Result<Request> {
    let stats = options.folder.join("stats.json");
    let output = options.folder.join("prompt.txt");
    fs::write(&output, prompt).map_err(|e| Error::io(&output, e))?;
    let ram = format!("{budget}%");
    let words = ["-q", "run", "-n", N_ANSWER, "--ignore-eos", "--temp", "0", "--force", "--ram"];
    let mut args: Vec<&OsStr> = words.iter().map(OsStr::new).collect();
    args.extend([OsStr::new(&ram), OsStr::new("--policy"), OsStr::new(policy)]);
    args.extend([OsStr::new("--profile"), profile.as_os_str(), OsStr::new("-f")]);
    args.extend([output.as_os_str(), OsStr::new("--stats"), stats.as_os_str()]);
    args.push(model.as_os_str());
    call(options.moeba, args)?;
    let text = fs::read_to_string(&stats).map_err(|e| Error::io(&stats, e))?;
    read(&text).map_err(|field| Error::invalid(format!("{}: no {field}", stats.display())))
}

/// A request's figures; the name of a missing one as the error.
fn read(stats: &str) -> std::result::Result<Request, String> {
    let stats: Value = serde_json::from_str(stats).map_err(|e| format!("JSON: {e}"))?;
    let number = |name: &str| stats[name].as_f64().ok_or_else(|| name.to_string());
    let tpot_ms = number("tpot_ms")?;
    Ok(Request {
        tpot_ms,
        ttft_ms: number("ttft_ms")?,
        hit_rate: number("hit_rate")?,
        stall_ms: number("stall_ms_per_token")?,
        mib: number("read_bytes")? / number("generated_tokens")? / f64::from(1 << 20),
        policy_share: number("policy_ms_per_token")? / tpot_ms,
    })
}

/// The times of all requests, and the figures of that of median time.
fn line(model: &str, policy: &str, budget: u32, mut requests: Vec<Request>) -> String {
    let tpots: Vec<String> = requests.iter().map(|r| format!("{:.6}", r.tpot_ms)).collect();
    requests.sort_by(|a, b| a.tpot_ms.total_cmp(&b.tpot_ms));
    let Request { ttft_ms, hit_rate, stall_ms, mib, policy_share, .. } =
        requests[requests.len() / 2];
    let figures = [hit_rate, stall_ms, mib, policy_share, ttft_ms];
    let figures = figures.map(|figure| format!("{figure:.6}")).join(";");
    format!("{model};{policy};{};{};{figures}\n", f64::from(budget) / 100.0, tpots.join(","))
}

/// The lines as a table, with the default beside the fastest of the others.
pub fn report(lines: &str) -> Result<String> {
    let runs = lines.lines().map(Live::parse).collect::<std::result::Result<Vec<_>, _>>();
    let runs = runs.map_err(Error::invalid)?;
    let mut text = String::from(
        "| model | budget | policy | ms a token | least | most | first token, ms | hit rate |\n\
         |---|---:|---|---:|---:|---:|---:|---:|\n",
    );
    for run in &runs {
        let [least, most] = run.extremes();
        text.push_str(&format!(
            "| {} | {:.0} % | {} | {:.3} | {least:.3} | {most:.3} | {:.1} | {:.1} % |\n",
            run.model,
            100.0 * run.budget,
            run.policy,
            run.median(),
            run.ttft_ms,
            100.0 * run.hit_rate,
        ));
    }
    text.push_str(
        "\n| model | budget | the fastest, by every other prompt | the default on the others |\n\
         |---|---:|---|---:|\n",
    );
    for pair in beside_best(&runs) {
        let Live { model, budget, .. } = pair.own;
        text.push_str(&format!(
            "| {model} | {:.0} % | {} | {:+.1} % |\n",
            100.0 * budget,
            pair.best.policy,
            pair.excess,
        ));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_whole_paragraphs() {
        let text =
            format!("{}\n\n{}\n\nshort\n\n{}", "a".repeat(1300), "b".repeat(700), "c".repeat(700));
        let found = prompts(&text, 2).unwrap();
        assert!(found[0].starts_with('a') && found[1].starts_with('b') && found[1].contains('c'));
        assert!(prompts(&text, 3).unwrap_err().to_string().contains("2 pieces"));
    }

    #[test]
    fn a_line_has_the_median_request_and_is_read_back() {
        let request = |tpot_ms: f64| Request {
            tpot_ms,
            ttft_ms: 10.0 * tpot_ms,
            hit_rate: 0.5,
            stall_ms: 0.25,
            mib: 3.0,
            policy_share: 0.01,
        };
        let written = line("demo", "finemoe", 25, [3.0, 1.0, 2.0].map(request).to_vec());
        let live = Live::parse(written.trim()).unwrap();
        assert_eq!(live.tpots, [3.0, 1.0, 2.0]);
        assert_eq!((live.ttft_ms, live.budget), (20.0, 0.25));
        assert!(
            report(&written).unwrap().contains("| demo | 25 % | finemoe | 2.000 | 1.000 | 3.000 |")
        );
    }

    #[test]
    fn a_missing_figure_is_named() {
        assert_eq!(read("{}").unwrap_err(), "tpot_ms");
    }
}
