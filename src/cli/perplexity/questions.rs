//! Files of tasks, in llama.cpp's formats. A task has some texts, of which the model should find
//! the right one the likeliest.

use super::random::Random;
use crate::{Error, Result};
use std::path::Path;

/// A task: each of its texts is `start` and one of the ends.
pub struct Task {
    pub texts: Vec<String>,
    /// The texts up to where what differs between them ends, where a format says so.
    pub heads: Vec<String>,
    /// The right texts.
    pub answers: Vec<usize>,
}

/// Six lines a task: a context, the number of the right ending, four endings. `n` of them are
/// chosen at random.
pub fn hellaswag(path: &Path, text: &str, n: usize) -> Result<Vec<Task>> {
    let lines: Vec<&str> = text.split('\n').collect();
    if !lines.len().is_multiple_of(6) {
        let got = format!("{} lines", lines.len());
        return Err(Error::format(path, "file", "six lines a task", got));
    }
    let mut left: Vec<&[&str]> = lines.chunks_exact(6).collect();
    let mut random = Random::new();
    let chosen = (0..n.min(left.len())).map(|_| left.remove(random.below(left.len() as u32)));
    let task = |lines: &[&str]| {
        let answer = lines[1].trim().parse().ok().filter(|answer| *answer < 4);
        let answer = answer.ok_or_else(|| {
            let expected = "the number of an ending, 0 to 3";
            Error::format(path, "second line of a task", expected, format!("{:?}", lines[1]))
        })?;
        let texts = lines[2..].iter().map(|ending| format!("{} {ending}", lines[0])).collect();
        Ok(Task { texts, heads: Vec::new(), answers: vec![answer] })
    };
    chosen.map(task).collect()
}

/// A line a task: number, sentence with `_`, two choices and the number of the right one, with
/// commas between them and the sentence perhaps in quotation marks. `n` of them are chosen at
/// random; 0 takes all. Lines that are none are left out, with a warning.
pub fn winogrande(path: &Path, text: &str, n: usize) -> Vec<Task> {
    // llama.cpp leaves out the last line, and scores compare only if both leave it out.
    let mut lines: Vec<&str> = text.split('\n').collect();
    lines.pop();
    let tasks = lines.iter().enumerate().filter_map(|(i, line)| {
        let task = sentence(line);
        if task.is_none() {
            let (path, n) = (path.display(), i + 1);
            log::warn!("{path}: line {n} is not NUMBER,SENTENCE WITH _,CHOICE,CHOICE,1 or 2");
        }
        task
    });
    let tasks: Vec<Task> = tasks.collect();
    match n {
        n if n > 0 && n < tasks.len() => Random::new().choose(tasks, n),
        _ => tasks,
    }
}

fn sentence(line: &str) -> Option<Task> {
    let mut is_quoted = false;
    let is_comma = |c: char| {
        is_quoted ^= c == '"';
        c == ',' && !is_quoted
    };
    let parts: Vec<&str> = line.splitn(5, is_comma).collect();
    let [_, sentence, first, second, answer] = parts[..] else { return None };
    let sentence = match sentence.strip_prefix('"') {
        Some(quoted) => quoted.strip_suffix('"')?,
        None => sentence,
    };
    let (before, behind) = sentence.split_once('_')?;
    let answer = match answer.split_whitespace().next()? {
        "1" => 0,
        "2" => 1,
        _ => return None,
    };
    let heads = [first, second].map(|choice| format!("{before}{choice}"));
    let texts = heads.iter().map(|head| format!("{head}{behind}")).collect();
    Some(Task { texts, heads: heads.into(), answers: vec![answer] })
}

/// A binary file: u32 the number of tasks, for each u32 its position in the file, and the tasks:
/// a question and two lists of answers, of which the first has the answers that count. A text is
/// u32 its length and its bytes; a list is u32 how many, the texts, and an i32 each, 1 if it is
/// right. `n` tasks are chosen at random; 0 takes all.
pub fn multiple_choice(path: &Path, bytes: &[u8], n: usize) -> Result<Vec<Task>> {
    let mut table = Cursor(bytes);
    let cut = || Error::format(path, "file", "tasks of multiple choice", "one that is cut short");
    let n_tasks = table.number().filter(|n| *n > 0).ok_or_else(cut)?;
    let places = table.take(4 * n_tasks as usize).ok_or_else(cut)?;
    if n == 0 || n >= n_tasks as usize {
        return (0..n_tasks).map(|_| table.task().ok_or_else(cut)?.check(path)).collect();
    }
    let places = places.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
    let task = |place: u32| {
        let mut cursor = Cursor(bytes.get(place as usize..).ok_or_else(cut)?);
        cursor.task().ok_or_else(cut)?.check(path)
    };
    Random::new().choose(places, n).into_iter().map(task).collect()
}

/// More answers than any task has.
const MAX_ANSWERS: u32 = 100;

/// The rest of a binary file.
struct Cursor<'a>(&'a [u8]);

impl Cursor<'_> {
    fn take(&mut self, n: usize) -> Option<&[u8]> {
        let (taken, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(taken)
    }

    fn number(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn text(&mut self) -> Option<String> {
        let n = self.number()? as usize;
        Some(String::from_utf8_lossy(self.take(n)?).into_owned())
    }

    fn answers(&mut self) -> Option<(Vec<String>, Vec<usize>)> {
        let n = self.number().filter(|n| *n <= MAX_ANSWERS)?;
        let texts = (0..n).map(|_| self.text()).collect::<Option<Vec<_>>>()?;
        let labels = (0..n).map(|_| self.number()).collect::<Option<Vec<_>>>()?;
        let right = (0..n as usize).filter(|i| labels[*i] == 1).collect();
        Some((texts, right))
    }

    fn task(&mut self) -> Option<Task> {
        let question = self.text()?;
        let (texts, answers) = self.answers()?;
        self.answers()?;
        let is_whole = !question.is_empty() && texts.iter().all(|text| !text.is_empty());
        let whole = |text: String| format!("{question} {text}");
        let texts = if is_whole { texts.into_iter().map(whole).collect() } else { Vec::new() };
        Some(Task { texts, heads: Vec::new(), answers })
    }
}

impl Task {
    fn check(self, path: &Path) -> Result<Task> {
        if self.texts.is_empty() {
            let expected = "a question and answers that are not empty";
            return Err(Error::format(path, "task", expected, "an empty one"));
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_are_read_with_quotation_marks_and_without() {
        let text = "0,Sarah beat Maria so _ won.,Sarah,Maria,1\n1,\"A, then _ came.\",x,y,2\nlast";
        let tasks = winogrande("f".as_ref(), text, 0);
        assert_eq!(
            tasks[0].texts,
            ["Sarah beat Maria so Sarah won.", "Sarah beat Maria so Maria won."]
        );
        assert_eq!(tasks[1].texts, ["A, then x came.", "A, then y came."]);
        assert_eq!(tasks[1].heads, ["A, then x", "A, then y"]);
        assert_eq!((&tasks[0].answers[..], &tasks[1].answers[..]), (&[0][..], &[1][..]));
        let bad = "0,no gap,a,b,1\n0,a _,b,1\n0,a _,b,c,3\n0,\"a _,b,c,1\n";
        assert!(winogrande("f".as_ref(), bad, 0).is_empty());
    }

    #[test]
    fn endings_are_chosen_at_random_or_all() {
        let text = (0..9).map(|i| format!("c{i}\n{}\na\nb\nc\nd", i % 4));
        let text = text.collect::<Vec<_>>().join("\n");
        let tasks = hellaswag("f".as_ref(), &text, 400).unwrap();
        let mut first: Vec<&str> = tasks.iter().map(|task| &task.texts[0][..]).collect();
        assert_ne!(first[0], "c0 a");
        first.sort_unstable();
        assert_eq!(first.len(), 9);
        assert_eq!(first[8], "c8 a");
        assert_eq!(hellaswag("f".as_ref(), &text, 2).unwrap().len(), 2);
        assert!(hellaswag("f".as_ref(), "a\nb", 2).is_err());
        assert!(hellaswag("f".as_ref(), "c\n4\na\nb\nc\nd", 2).is_err());
    }

    #[test]
    fn binary_tasks_are_read_by_their_positions() {
        let text = |bytes: &mut Vec<u8>, text: &str| {
            bytes.extend((text.len() as u32).to_le_bytes());
            bytes.extend(text.as_bytes());
        };
        let mut tasks = Vec::new();
        let mut places = Vec::new();
        for question in ["Q0", "Q1", "Q2"] {
            places.push(16 + tasks.len() as u32);
            text(&mut tasks, question);
            tasks.extend(2u32.to_le_bytes());
            ["x", "yes"].iter().for_each(|answer| text(&mut tasks, answer));
            [0u32, 1, 0].iter().for_each(|n| tasks.extend(n.to_le_bytes()));
        }
        let header = [3].into_iter().chain(places).flat_map(u32::to_le_bytes);
        let bytes: Vec<u8> = header.chain(tasks).collect();
        let all = multiple_choice("f".as_ref(), &bytes, 0).unwrap();
        assert_eq!((all.len(), &all[2].texts[1][..], all[2].answers[0]), (3, "Q2 yes", 1));
        assert_eq!(multiple_choice("f".as_ref(), &bytes, 2).unwrap().len(), 2);
        for n in 0..bytes.len() {
            assert!(multiple_choice("f".as_ref(), &bytes[..n], 0).is_err(), "{n} bytes");
        }
    }
}
