//! Scores of tasks: how often a model finds the right text the likeliest, by the mean
//! log-probability of the tokens in which a task's texts differ. Rules and lines are llama.cpp's.

use super::Args;
use super::questions::{self, Task};
use super::windows::{nll, normalizer};
use crate::cli::args;
use crate::cli::out;
use crate::cli::prompt::read_text;
use crate::cli::stats::Stats;
use crate::engine::{Engine, Session};
use crate::tokenizer::EncodeOptions;
use crate::{Error, Result, terminal};
use std::path::Path;
use std::sync::Arc;

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Tasks")]
pub struct TaskArgs {
    /// Score HellaSwag's tasks: six lines each in --file
    #[arg(long, conflicts_with_all = ["winogrande", "multiple_choice", "kl_divergence"])]
    hellaswag: bool,
    /// Tasks of HellaSwag that are chosen at random
    #[arg(long, value_name = "N", default_value = "400", value_parser = args::tokens)]
    hellaswag_tasks: usize,
    /// Score Winogrande's tasks: lines NUMBER,SENTENCE,CHOICE,CHOICE,ANSWER in --file
    #[arg(long, conflicts_with_all = ["multiple_choice", "kl_divergence"])]
    winogrande: bool,
    /// Tasks of Winogrande that are chosen at random; 0 is all
    #[arg(long, value_name = "N", default_value = "0", value_parser = args::tokens_or_zero)]
    winogrande_tasks: usize,
    /// Score tasks of multiple choice, such as ARC's, MMLU's and TruthfulQA's: a file in
    /// llama.cpp's binary format
    #[arg(long, conflicts_with = "kl_divergence")]
    multiple_choice: bool,
    /// Tasks of multiple choice that are chosen at random; 0 is all
    #[arg(long, value_name = "N", default_value = "0", value_parser = args::tokens_or_zero)]
    multiple_choice_tasks: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    HellaSwag,
    Winogrande,
    MultipleChoice,
}

/// llama.cpp computes the texts of a task in a context of so many windows, together.
const N_SHARED: usize = 4;

/// Winogrande's choices themselves count only where fewer tokens than these follow them.
const MIN_BEHIND: usize = 3;

impl TaskArgs {
    pub fn kind(&self) -> Option<Kind> {
        let all = [
            (self.hellaswag, Kind::HellaSwag),
            (self.winogrande, Kind::Winogrande),
            (self.multiple_choice, Kind::MultipleChoice),
        ];
        all.into_iter().find_map(|(is_given, kind)| is_given.then_some(kind))
    }

    fn read(&self, kind: Kind, file: &Path) -> Result<Vec<Task>> {
        if kind == Kind::MultipleChoice {
            let bytes = std::fs::read(file).map_err(|e| Error::io(file, e))?;
            return questions::multiple_choice(file, &bytes, self.multiple_choice_tasks);
        }
        let text = read_text(file)?;
        let text = text.strip_suffix('\n').unwrap_or(&text);
        match kind {
            Kind::HellaSwag => questions::hellaswag(file, text, self.hellaswag_tasks),
            _ => Ok(questions::winogrande(file, text, self.winogrande_tasks)),
        }
    }
}

pub fn run(args: &Args, file: &Path) -> Result<()> {
    let kind = args.tasks.kind().expect("a kind of tasks is given");
    let tasks = args.tasks.read(kind, file)?;
    if tasks.is_empty() {
        return Err(Error::format(file, "file", "tasks", "none"));
    }
    let options = args.batch.options(N_SHARED * args.windows.ctx_size, args.threads.count());
    let engine = args.model.resolve()?.load(&options)?;
    let mut judge =
        Judge { session: engine.new_session()?, engine, n_batch: args.batch.sizes.batch_size };
    let bar = terminal::bar_beside_output("tasks", tasks.len() as u64);
    let (mut n_right, mut n_texts) = (0, 0);
    if let Some(heading) = kind.heading() {
        out::line(heading)?;
    }
    for (i, task) in tasks.iter().enumerate() {
        let scores = judge.scores(kind, task).map_err(|why| of_task(i, why))?;
        let best = kind.best(&scores);
        n_right += usize::from(task.answers.contains(&best));
        n_texts += scores.len();
        bar.inc(1);
        out::line(&kind.line([n_right, i + 1], &scores, [best, task.answers[0]]))?;
    }
    drop(bar);
    let n = tasks.len();
    kind.end([n_right, n, n_texts])?;
    let Some(path) = &args.stats else { return Ok(()) };
    let mut stats = Stats::new();
    stats.number("accuracy", n_right as f64 / n as f64);
    stats.count("right_answers", n_right as u64);
    stats.count("tasks", n as u64);
    stats.process();
    stats.write(path)
}

fn of_task(i: usize, why: Error) -> Error {
    match why {
        Error::Interrupted => why,
        why => Error::invalid(format!("task {}: {why}", i + 1)),
    }
}

impl Kind {
    fn heading(self) -> Option<&'static str> {
        match self {
            Kind::HellaSwag => Some("task\tacc_norm\t95% confidence interval"),
            Kind::Winogrande => None,
            Kind::MultipleChoice => Some("task\tacc_norm"),
        }
    }

    /// The text of the greatest score: of equal ones the first, but with Winogrande the second.
    fn best(self, scores: &[f64]) -> usize {
        if self == Kind::Winogrande {
            return usize::from(scores[0] <= scores[1]);
        }
        let better = |best: usize, i: usize| if scores[i] > scores[best] { i } else { best };
        (0..scores.len()).fold(0, better)
    }

    /// The line after a task, of all so far and of this one: best text and right one.
    fn line(self, [n_right, n]: [usize; 2], scores: &[f64], [best, right]: [usize; 2]) -> String {
        let share = n_right as f64 / n as f64;
        match self {
            Kind::HellaSwag => {
                let [least, most] = wilson(share, n as f64).map(|p| 100.0 * p);
                format!("{n}\t{:.8}%\t[{least:.4}%, {most:.4}%]", 100.0 * share)
            }
            Kind::Winogrande => {
                let [a, b] = [scores[0], scores[1]];
                format!(
                    "{n}\t{:.4}\t{a:10.6}  {b:10.6}  {}  {}",
                    100.0 * share,
                    best + 1,
                    right + 1
                )
            }
            Kind::MultipleChoice => format!("{n}\t{:.8}", 100.0 * share),
        }
    }

    /// The lines behind all tasks, with the standard errors.
    fn end(self, [n_right, n, n_texts]: [usize; 3]) -> Result<()> {
        let error = |share: f64| (share * (1.0 - share) / (n as f64 - 1.0)).max(0.0).sqrt();
        let percent = |share: f64| format!("{:.4} +/- {:.4}", 100.0 * share, 100.0 * error(share));
        let share = n_right as f64 / n as f64;
        match self {
            Kind::HellaSwag => Ok(()),
            _ if n < 2 => Ok(()),
            Kind::Winogrande => {
                out::line(&format!("Final Winogrande score({n} tasks): {}", percent(share)))
            }
            Kind::MultipleChoice => {
                out::line(&format!("Final result: {}", percent(share)))?;
                out::line(&format!("Random chance: {}", percent(n as f64 / n_texts as f64)))
            }
        }
    }
}

/// Wilson's interval of 95 % for a share of `n`.
fn wilson(share: f64, n: f64) -> [f64; 2] {
    let za = 1.959_963_984_54;
    let z = za * za / n;
    let half = z * (n * (4.0 * share * (1.0 - share) + z)).sqrt() / (za + za);
    [-half, half].map(|half| (share + z * 0.5 + half) / (1.0 + z))
}

/// Computes the texts of tasks.
struct Judge {
    engine: Arc<Engine>,
    session: Session,
    n_batch: usize,
}

impl Judge {
    /// The mean log-probability of each of a task's texts.
    fn scores(&mut self, kind: Kind, task: &Task) -> Result<Vec<f64>> {
        let texts: Vec<Vec<u32>> = task.texts.iter().map(|text| self.tokens(text)).collect();
        let n_same = n_same(&texts);
        let needed = n_same + texts.iter().map(|text| text.len() - n_same).sum::<usize>();
        if texts.iter().any(|text| text.len() < 2) {
            return Err(Error::invalid("one of its texts has fewer than two tokens"));
        }
        if needed > self.engine.n_ctx() {
            return Err(Error::invalid(format!(
                "its texts have {needed} tokens, but {N_SHARED} windows are {}: raise -c",
                self.engine.n_ctx()
            )));
        }
        if kind == Kind::Winogrande {
            let heads: Vec<usize> = task.heads.iter().map(|h| self.tokens(h).len()).collect();
            return self.winogrande(&texts, n_same, [heads[0], heads[1]]);
        }
        let mean = |text: &Vec<u32>| {
            let all = self.log_probabilities(text, n_same.clamp(1, text.len() - 1))?;
            Ok(all.iter().sum::<f64>() / all.len() as f64)
        };
        texts.iter().map(mean).collect()
    }

    fn tokens(&self, text: &str) -> Vec<u32> {
        let options = EncodeOptions { add_special: true, parse_special: false };
        self.engine.tokenizer().encode(text, options)
    }

    /// Log-probabilities of the tokens from index `from` on; a first token has none.
    fn log_probabilities(&mut self, tokens: &[u32], from: usize) -> Result<Vec<f64>> {
        let mut all = Vec::with_capacity(tokens.len() - from);
        self.logits(&tokens[..tokens.len() - 1], from - 1, &mut |at, logits| {
            all.push(-nll(logits, tokens[at + 1]));
        })?;
        Ok(all)
    }

    /// The logits of the tokens from index `from` on.
    fn logits(
        &mut self,
        tokens: &[u32],
        from: usize,
        on_logits: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<()> {
        // What the last text had in common with this one stays, but for the last token before what
        // is wanted.
        let n_left = self.session.sync(&tokens[..=from])?;
        let mut at = from + 1 - n_left;
        for part in tokens[at..].chunks(self.n_batch) {
            self.session.eval_all(part, &mut |i, logits| {
                if at + i >= from {
                    on_logits(at + i, logits);
                }
            })?;
            at += part.len();
        }
        Ok(())
    }

    /// Tokens behind the choices count, but for the last; where there are few of them, the choices
    /// count too.
    fn winogrande(
        &mut self,
        texts: &[Vec<u32>],
        n_same: usize,
        heads: [usize; 2],
    ) -> Result<Vec<f64>> {
        let leaves_choices_out = texts.iter().all(|text| text.len() - n_same > MIN_BEHIND);
        let mut scores = Vec::new();
        // llama.cpp takes the first token that differs in the second text for one behind the whole
        // first text. Scores compare only if that is done here too.
        let mut behind_first = None;
        for (i, (text, head)) in texts.iter().zip(heads).enumerate() {
            let from = if leaves_choices_out { head } else { n_same }.max(1);
            let n = text.len().saturating_sub(from);
            let n = if n > 1 { n - 1 } else { n };
            if n == 0 {
                return Err(Error::invalid("nothing follows one of its choices"));
            }
            let mut all = Vec::new();
            let second = texts[1][n_same.min(texts[1].len() - 1)];
            self.logits(text, from - 1, &mut |at, logits| {
                if at + 1 < from + n {
                    all.push(-nll(logits, text[at + 1]));
                } else if at + 1 == text.len() && i == 0 {
                    let (max, log_sum) = normalizer(logits);
                    behind_first = Some(f64::from(logits[second as usize] - max) - log_sum);
                }
            })?;
            if let (1, false, Some(odd)) = (i, leaves_choices_out, behind_first) {
                all[0] = odd;
            }
            scores.push(all.iter().sum::<f64>() / n as f64);
        }
        Ok(scores)
    }
}

/// Tokens that all texts begin with.
fn n_same(texts: &[Vec<u32>]) -> usize {
    let (first, others) = texts.split_first().expect("a task has texts");
    let same = |i: &usize| others.iter().all(|text| text.get(*i) == first.get(*i));
    (0..first.len()).take_while(same).count()
}
