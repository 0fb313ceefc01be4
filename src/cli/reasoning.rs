//! Flags that say whether and how long a model thinks before it answers, and where its reasoning
//! goes.

use super::answer::ReasoningFormat;
use super::args::MAX_TOKENS;
use super::values::{self, Parsed};
use crate::Result;
use crate::chat::reasoning::{Budget, Format, Think};
use crate::chat::{ChatTemplate, RESERVED};
use crate::tokenizer::Tokenizer;
use serde_json::{Map, Value};

/// Variables of a chat template.
pub type Variables = Map<String, Value>;

/// Variables given as JSON, for every command that renders a template.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Reasoning")]
pub struct TemplateArgs {
    /// Variables for the chat template, as a JSON object: {"enable_thinking": false}
    #[arg(long, value_name = "JSON", value_parser = variables)]
    #[arg(env = "MOEBA_CHAT_TEMPLATE_KWARGS")]
    pub chat_template_kwargs: Option<Variables>,
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Reasoning")]
pub struct ReasoningArgs {
    #[command(flatten)]
    template: TemplateArgs,
    /// Whether the model thinks before it answers: on, off, low, medium or high, by its template's
    /// switch; auto leaves it to that, and thinks where a missing enable_thinking means off
    /// (or -rea)
    #[arg(long, visible_alias = "reasoning", value_name = "LEVEL", default_value = "auto")]
    #[arg(value_parser = think, env = "MOEBA_REASONING")]
    think: ThinkLevel,
    /// The chat template's reasoning_effort, passed as it is; default is the template's own
    #[arg(long, value_name = "LEVEL", default_value = DEFAULT_EFFORT)]
    #[arg(env = "MOEBA_REASONING_EFFORT")]
    reasoning_effort: String,
    /// Tokens of reasoning before the answer is forced to begin; -1 is any number, 0 none
    #[arg(long, value_name = "N", default_value = "-1", value_parser = budget)]
    #[arg(env = "MOEBA_REASONING_BUDGET")]
    reasoning_budget: i64,
    /// The last words of a reasoning that the budget ends
    #[arg(long, value_name = "TEXT", default_value = "", allow_hyphen_values = true)]
    #[arg(hide_default_value = true, env = "MOEBA_REASONING_BUDGET_MESSAGE")]
    reasoning_budget_message: String,
    /// Keep the reasoning of earlier answers in the prompt, by the chat template's own switch
    #[arg(long, overrides_with = "no_reasoning_preserve")]
    reasoning_preserve: bool,
    /// Leave the reasoning of earlier answers out of the prompt
    #[arg(long, overrides_with = "reasoning_preserve")]
    no_reasoning_preserve: bool,
    /// Output of reasoning: auto and deepseek show it dim on a terminal and leave it out of pipes;
    /// deepseek-legacy writes it to both, with its markers; none writes all text as it comes
    #[arg(long, value_name = "FORMAT", default_value = "auto", value_parser = reasoning_format)]
    #[arg(env = "MOEBA_REASONING_FORMAT")]
    reasoning_format: ReasoningFormat,
}

/// `None` is auto.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ThinkLevel(Option<Think>);

fn variables(text: &str) -> Parsed<Variables> {
    let wrong = "expected a JSON object, as {\"enable_thinking\": false}";
    let json: Value = serde_json::from_str(text).map_err(|e| format!("{wrong}: {e}"))?;
    let Value::Object(variables) = json else { return Err(wrong.into()) };
    match RESERVED.iter().find(|name| variables.contains_key(**name)) {
        Some(name) => Err(format!("{name} is set by moeba")),
        None => Ok(variables),
    }
}

fn think(text: &str) -> Parsed<ThinkLevel> {
    let level = match text.to_ascii_lowercase().as_str() {
        "auto" | "-1" => None,
        "on" | "enabled" | "true" | "1" => Some(Think::On),
        "off" | "disabled" | "false" | "0" | "none" => Some(Think::Off),
        "low" => Some(Think::Low),
        "medium" => Some(Think::Medium),
        "high" => Some(Think::High),
        _ => return Err("expected on, off, low, medium, high or auto".into()),
    };
    Ok(ThinkLevel(level))
}

const DEFAULT_EFFORT: &str = "default";

fn effort(text: &str) -> Option<String> {
    (text != DEFAULT_EFFORT).then(|| text.to_owned())
}

fn budget(text: &str) -> Parsed<i64> {
    values::integer(text, -1, MAX_TOKENS)
}

/// Values of `--reasoning-format`.
pub const FORMATS: &[&str] = &["auto", "deepseek", "deepseek-legacy", "none"];

fn reasoning_format(text: &str) -> Parsed<ReasoningFormat> {
    match text {
        "auto" | "deepseek" => Ok(ReasoningFormat::Apart),
        "deepseek-legacy" => Ok(ReasoningFormat::Legacy),
        "none" => Ok(ReasoningFormat::None),
        _ => Err("expected auto, deepseek, deepseek-legacy or none".into()),
    }
}

impl ReasoningArgs {
    pub fn settings(&self) -> Reasoning {
        Reasoning {
            kwargs: self.template.chat_template_kwargs.clone().unwrap_or_default(),
            think: self.think.0,
            effort: effort(&self.reasoning_effort),
            budget: usize::try_from(self.reasoning_budget).ok(),
            message: self.reasoning_budget_message.clone(),
            keep: match (self.reasoning_preserve, self.no_reasoning_preserve) {
                (false, false) => None,
                (keep, _) => Some(keep),
            },
            format: self.reasoning_format,
        }
    }
}

/// The options that `set` changes.
pub const OPTIONS: [&str; 4] =
    ["think", "reasoning-effort", "reasoning-budget", "reasoning-format"];

/// The reasoning options of a run.
#[derive(Clone, Debug, Default)]
pub struct Reasoning {
    kwargs: Variables,
    think: Option<Think>,
    effort: Option<String>,
    budget: Option<usize>,
    message: String,
    /// Whether reasoning of earlier answers stays in the prompt; `None`: as the template has it.
    keep: Option<bool>,
    pub format: ReasoningFormat,
}

impl Reasoning {
    /// Changes an option by its flag's name; whether there is one of this name.
    pub fn set(&mut self, name: &str, value: &str) -> Parsed<bool> {
        match name {
            "think" => self.think = think(value)?.0,
            "reasoning-effort" => self.effort = effort(value),
            "reasoning-budget" => self.budget = usize::try_from(budget(value)?).ok(),
            "reasoning-format" => self.format = reasoning_format(value)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// The options that `set` changes, with their values.
    pub fn settings(&self) -> Vec<(&'static str, String)> {
        let format = match self.format {
            ReasoningFormat::Apart => "auto",
            ReasoningFormat::Legacy => "deepseek-legacy",
            ReasoningFormat::None => "none",
        };
        let values = [
            self.think().into(),
            self.effort.clone().unwrap_or_else(|| DEFAULT_EFFORT.into()),
            self.budget.map_or("-1".into(), |n| n.to_string()),
            format.into(),
        ];
        OPTIONS.into_iter().zip(values).collect()
    }

    /// The value of `think`.
    pub fn think(&self) -> &'static str {
        match self.think {
            None => "auto",
            Some(Think::On) => "on",
            Some(Think::Off) => "off",
            Some(Think::Low) => "low",
            Some(Think::Medium) => "medium",
            Some(Think::High) => "high",
        }
    }

    /// Whether a flag asks for something that only a chat can do.
    pub fn is_set(&self) -> bool {
        let told = self.think.is_some() || self.effort.is_some() || self.budget.is_some();
        told || !self.kwargs.is_empty()
    }

    /// Tokens of reasoning at most.
    pub fn budget_tokens(&self) -> Option<usize> {
        self.budget
    }

    /// Whether reasoning stays in the text of an answer.
    pub fn is_in_content(&self) -> bool {
        self.format != ReasoningFormat::Apart
    }

    /// The end of reasoning that the budget forces.
    pub fn budget(&self, format: &Format, tokenizer: &Tokenizer) -> Option<Budget> {
        self.budget.map(|n| Budget::new(n, format.end_tokens(tokenizer, &self.message)))
    }

    /// Says which flags have no effect on a model without reasoning.
    pub fn warn_of(&self, format: Option<&Format>) {
        if format.is_none() && self.budget.is_some() {
            log::warn!(
                "the chat template shows no form of reasoning that moeba knows: \
                 --reasoning-budget has no effect"
            );
        }
    }

    /// The template's variables: JSON counts before flags. A flag that the template cannot follow
    /// is told.
    pub fn variables(&self, template: &ChatTemplate) -> Result<Variables> {
        let mut variables = template.thinking_by_default()?;
        if let Some(think) = self.think {
            match template.thinking(think)? {
                Some(setting) => {
                    if setting.ungraded {
                        log::warn!("the chat template knows thinking only as on and off: it is on");
                    }
                    variables.extend(setting.variables);
                }
                None if think == Think::Off => log::warn!(
                    "the chat template has no switch that turns thinking off; \
                     --reasoning-budget 0 ends it at once"
                ),
                None => log::warn!("the chat template has no switch for thinking"),
            }
        }
        if let (Some(0), None) = (self.budget, self.think) {
            variables.extend(template.thinking(Think::Off)?.unwrap_or_default().variables);
        }
        if let Some(n) = self.budget {
            variables.extend(template.thinking_budget(n)?);
        }
        if let Some(keep) = self.keep {
            let keeping = template.keeping_reasoning(keep)?;
            if keeping.is_empty() {
                log::warn!(
                    "the chat template has no switch that keeps the reasoning of earlier answers"
                );
            }
            variables.extend(keeping);
        }
        if let Some(effort) = &self.effort {
            variables.insert("reasoning_effort".into(), effort.as_str().into());
        }
        variables.extend(self.kwargs.clone());
        Ok(variables)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn variables_are_an_object_without_names_of_ours() {
        let ok = variables(r#"{"enable_thinking": false}"#).unwrap();
        assert_eq!(Value::Object(ok), json!({"enable_thinking": false}));
        for (bad, expected) in [
            ("[]", "expected a JSON object"),
            ("{", "expected a JSON object, as {\"enable_thinking\": false}: EOF"),
            (r#"{"messages": []}"#, "messages is set by moeba"),
        ] {
            let why = variables(bad).unwrap_err();
            assert!(why.starts_with(expected), "{why}");
        }
    }

    #[test]
    fn levels_are_llama_cpps_and_grades() {
        assert_eq!(think("AUTO"), Ok(ThinkLevel(None)));
        assert_eq!(think("1"), Ok(ThinkLevel(Some(Think::On))));
        assert_eq!(think("disabled"), Ok(ThinkLevel(Some(Think::Off))));
        assert!(think("some").unwrap_err().contains("low, medium"));
    }

    #[test]
    fn json_counts_before_flags() {
        let source = "{{ enable_thinking }}{{ reasoning_effort }}";
        let template = ChatTemplate::new(source, "", "").unwrap();
        let mut reasoning = Reasoning { effort: Some("odd".into()), ..Reasoning::default() };
        assert_eq!(reasoning.set("think", "high"), Ok(true));
        let got = reasoning.variables(&template).unwrap();
        let expected = json!({"enable_thinking": true, "reasoning_effort": "odd"});
        assert_eq!(Value::Object(got), expected);
        reasoning.kwargs = variables(r#"{"enable_thinking": 0, "x": 1}"#).unwrap();
        let got = reasoning.variables(&template).unwrap();
        let expected = json!({"enable_thinking": 0, "reasoning_effort": "odd", "x": 1});
        assert_eq!(Value::Object(got), expected);
    }

    #[test]
    fn a_missing_switch_is_on_unless_it_is_set() {
        let source = "{% if not enable_thinking %}</think>{% endif %}";
        let template = ChatTemplate::new(source, "", "").unwrap();
        let mut reasoning = Reasoning::default();
        let variables = |r: &Reasoning| Value::Object(r.variables(&template).unwrap());
        assert_eq!(variables(&reasoning), json!({"enable_thinking": true}));
        reasoning.kwargs = super::variables(r#"{"enable_thinking": false}"#).unwrap();
        assert_eq!(variables(&reasoning), json!({"enable_thinking": false}));
        reasoning.kwargs.clear();
        reasoning.set("think", "off").unwrap();
        assert_eq!(variables(&reasoning), json!({"enable_thinking": false}));
    }

    #[test]
    fn no_budget_is_off_where_the_template_has_a_switch() {
        let template = ChatTemplate::new("{{ enable_thinking }}", "", "").unwrap();
        let mut reasoning = Reasoning::default();
        assert_eq!(reasoning.set("reasoning-budget", "0"), Ok(true));
        let variables = |r: &Reasoning| Value::Object(r.variables(&template).unwrap());
        assert_eq!(variables(&reasoning), json!({"enable_thinking": false}));
        reasoning.set("think", "on").unwrap();
        assert_eq!(variables(&reasoning), json!({"enable_thinking": true}));
        reasoning.set("reasoning-budget", "5").unwrap();
        let seed = ChatTemplate::new("{{ thinking_budget }}", "", "").unwrap();
        let got = reasoning.variables(&seed).unwrap();
        assert_eq!(Value::Object(got), json!({"thinking_budget": 5}));
    }

    #[test]
    fn options_that_set_changes_are_those_that_are_listed() {
        let mut reasoning = Reasoning::default();
        for (name, value) in reasoning.clone().settings() {
            assert_eq!(reasoning.set(name, &value), Ok(true), "{name}");
        }
        assert_eq!(reasoning.settings(), Reasoning::default().settings());
        assert_eq!(reasoning.set("temp", "1"), Ok(false));
        assert!(reasoning.set("reasoning-format", "odd").is_err());
    }
}
