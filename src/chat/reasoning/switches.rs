//! How a template is told whether to think and how much: each family has a variable of its own.
//! Which ones a template reads is asked of its syntax tree, and which values it takes of the
//! template itself, since some refuse a value that others know.

use super::super::{ChatTemplate, environment};
use crate::Result;
use regex::Regex;
use serde_json::{Map, Value, json};

/// The reasoning that a user asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Think {
    On,
    Off,
    Low,
    Medium,
    High,
}

/// One value of a switch.
enum Choice {
    Bool(bool),
    Number(i64),
    /// Taken if the template renders with it.
    Text(&'static str),
    /// Taken if the template's source names it in quotes: others would print it unread.
    Named(&'static str),
}

use Choice::{Bool, Named, Number, Text};

/// A variable and its values, the first that fits counts. Without values for the grades, a grade
/// is `on`.
struct Switch {
    name: &'static str,
    on: &'static [Choice],
    off: &'static [Choice],
    low: &'static [Choice],
    medium: &'static [Choice],
    high: &'static [Choice],
}

const fn on_off(name: &'static str, on: &'static [Choice], off: &'static [Choice]) -> Switch {
    Switch { name, on, off, low: &[], medium: &[], high: &[] }
}

const SWITCHES: &[Switch] = &[
    // Qwen3, GLM, Hunyuan, ERNIE, Nemotron, SmolLM, Gemma, Apertus, …
    on_off("enable_thinking", &[Bool(true)], &[Bool(false)]),
    // DeepSeek V3.1 and later, Granite, Kimi
    on_off("thinking", &[Bool(true)], &[Bool(false)]),
    // gpt-oss, Solar Open, Hunyuan 3, DeepSeek V4, Command
    Switch {
        name: "reasoning_effort",
        on: &[Text("medium"), Text("high")],
        off: &[Named("none"), Named("no_think"), Named("minimal")],
        low: &[Text("low")],
        medium: &[Text("medium"), Text("high")],
        high: &[Text("high")],
    },
    // Kimi K3, beside `thinking`
    Switch {
        name: "thinking_effort",
        on: &[],
        off: &[],
        low: &[Text("low")],
        medium: &[Text("medium"), Text("high")],
        high: &[Text("high")],
    },
    // Seed: tokens, of which it is told in multiples of 512
    Switch {
        name: "thinking_budget",
        on: &[Number(-1)],
        off: &[Number(0)],
        low: &[Number(512)],
        medium: &[Number(4096)],
        high: &[Number(16384)],
    },
    // MiniMax M3, Baichuan
    on_off("thinking_mode", &[Named("enabled"), Named("on")], &[Named("disabled"), Named("off")]),
    // Ling
    on_off("thinking_option", &[Named("on")], &[Named("off")]),
];

/// The variable that also takes a budget in tokens.
const BUDGET: &str = "thinking_budget";

/// Variables that say whether reasoning of earlier answers stays in the prompt, and their values if
/// it does: LFM and Laguna, Hunyuan 3 and Ling, LFM, GLM, Nemotron, DeepSeek V4.
const KEEPERS: &[(&str, bool)] = &[
    ("preserve_thinking", true),
    ("preserved_thinking", true),
    ("keep_past_thinking", true),
    ("clear_thinking", false),
    ("truncate_history_thinking", false),
    ("drop_thinking", false),
];

/// Variables that make a template think as asked.
#[derive(Debug, Default, PartialEq)]
pub struct Setting {
    pub variables: Map<String, Value>,
    /// A grade was asked for, and the template knows only on and off.
    pub ungraded: bool,
}

impl Switch {
    /// The values for `think`, and whether they stand for the grade that was asked for.
    fn choices(&self, think: Think) -> (&'static [Choice], bool) {
        let graded = match think {
            Think::On => self.on,
            Think::Off => self.off,
            Think::Low => self.low,
            Think::Medium => self.medium,
            Think::High => self.high,
        };
        match graded {
            [] if think != Think::Off => (self.on, think == Think::On),
            choices => (choices, true),
        }
    }
}

impl ChatTemplate {
    /// The variables to pass to `render` for `think`; `None` if the template has no switch for it.
    pub fn thinking(&self, think: Think) -> Result<Option<Setting>> {
        let reads = self.variables()?;
        let mut setting = Setting { ungraded: true, ..Setting::default() };
        for switch in SWITCHES.iter().filter(|switch| reads(switch.name)) {
            let (choices, graded) = switch.choices(think);
            if let Some(value) = choices.iter().find_map(|choice| self.taken(switch.name, choice)) {
                setting.variables.insert(switch.name.into(), value);
                setting.ungraded &= !graded;
            }
        }
        Ok((!setting.variables.is_empty()).then_some(setting))
    }

    /// Variables that let a template think where nothing is said, if it takes a missing switch for
    /// one that is off, as `{% if not enable_thinking %}` does; empty otherwise.
    pub fn thinking_by_default(&self) -> Result<Map<String, Value>> {
        const PLAIN: &str = r"\bnot\s+enable_thinking\s*(-?%\}|\)|and\b|or\b)";
        let switch = |is_on: bool| Map::from_iter([("enable_thinking".to_owned(), is_on.into())]);
        let is_plain = Regex::new(PLAIN).is_ok_and(|pattern| pattern.is_match(&self.source));
        if !is_plain || !self.variables()?("enable_thinking") {
            return Ok(Map::new());
        }
        let question = json!([{ "role": "user", "content": "?" }]);
        let render = |variables: &Map<_, _>| self.render(&question, None, true, variables).ok();
        let (off, on) = (render(&switch(false)), render(&switch(true)));
        let is_off = off.is_some() && render(&Map::new()) == off && on.is_some() && on != off;
        Ok(if is_off { switch(true) } else { Map::new() })
    }

    /// The variables that make the template keep the reasoning of earlier answers, or leave it out;
    /// empty if it has no switch for that.
    pub fn keeping_reasoning(&self, keep: bool) -> Result<Map<String, Value>> {
        let reads = self.variables()?;
        let known = KEEPERS.iter().filter(|(name, _)| reads(name));
        Ok(known.map(|(name, kept)| (name.to_string(), (*kept == keep).into())).collect())
    }

    /// The variable that tells the template of a budget of `n` tokens, if it wants to know.
    pub fn thinking_budget(&self, n: usize) -> Result<Option<(String, Value)>> {
        Ok(self.variables()?(BUDGET).then(|| (BUDGET.to_string(), n.into())))
    }

    /// Whether the template reads a variable of this name.
    fn variables(&self) -> Result<impl Fn(&str) -> bool + '_> {
        let free = environment::variables(self.main.clone())?;
        // `{% set x = x | default(true) %}` counts as the template's own name.
        let has_default = |name: &str| {
            let pattern = format!(r"set\s+{name}\s*=\s*{name}\s*(\||if\b)");
            Regex::new(&pattern).is_ok_and(|pattern| pattern.is_match(&self.source))
        };
        Ok(move |name: &str| free.contains(name) || has_default(name))
    }

    /// The choice's value if the template takes it.
    fn taken(&self, name: &str, choice: &Choice) -> Option<Value> {
        let value = match choice {
            Bool(yes) => json!(yes),
            Number(n) => json!(n),
            Text(text) | Named(text) => json!(text),
        };
        let fits = match choice {
            Bool(_) | Number(_) => true,
            Text(_) => self.renders(&Map::from_iter([(name.into(), value.clone())])),
            Named(text) => {
                ['"', '\''].iter().any(|q| self.source.contains(&format!("{q}{text}{q}")))
            }
        };
        fits.then_some(value)
    }

    /// Whether a simple question renders with these variables, or does not without them either.
    fn renders(&self, variables: &Map<String, Value>) -> bool {
        let question = json!([{ "role": "user", "content": "?" }]);
        let render = |variables: &Map<_, _>| self.render(&question, None, true, variables).is_ok();
        render(variables) || !render(&Map::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setting(source: &str, think: Think) -> Option<(Value, bool)> {
        let template = ChatTemplate::new(source, "", "").unwrap();
        let setting = template.thinking(think).unwrap()?;
        Some((Value::Object(setting.variables), setting.ungraded))
    }

    const ALL: [Think; 5] = [Think::On, Think::Off, Think::Low, Think::Medium, Think::High];

    #[test]
    fn on_and_off_are_booleans() {
        let source = "{% if enable_thinking is defined and enable_thinking is false %}x{% endif %}";
        assert_eq!(setting(source, Think::Off), Some((json!({"enable_thinking": false}), false)));
        assert_eq!(setting(source, Think::On), Some((json!({"enable_thinking": true}), false)));
        assert_eq!(setting(source, Think::Low), Some((json!({"enable_thinking": true}), true)));
    }

    /// A field of a message that has the switch's name is no switch.
    #[test]
    fn a_template_without_a_switch_has_none() {
        let source = "{% for m in messages %}{{ m.thinking }}{{ m['enable_thinking'] }}{% endfor %}
            {% set thinking_budget = 3 %}{{ thinking_budget }}";
        for think in ALL {
            assert_eq!(setting(source, think), None);
        }
    }

    #[test]
    fn a_default_does_not_hide_the_switch() {
        let source = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}
            {%- macro system() %}{% if reasoning_effort is not defined %}
            {% set reasoning_effort = 'medium' %}{% endif %}{{ reasoning_effort }}{% endmacro %}
            {{ system() }}{{ thinking }}";
        let expected = json!({"thinking": true, "reasoning_effort": "high"});
        assert_eq!(setting(source, Think::High), Some((expected, false)));
        // `thinking` goes off; gpt-oss has no effort for "not at all".
        assert_eq!(setting(source, Think::Off), Some((json!({"thinking": false}), false)));
    }

    #[test]
    fn a_missing_switch_is_on_where_the_template_takes_it_for_off() {
        let by_default = |source: &str| {
            let template = ChatTemplate::new(source, "", "").unwrap();
            Value::Object(template.thinking_by_default().unwrap())
        };
        let on = json!({"enable_thinking": true});
        assert_eq!(by_default("<think>{%- if not enable_thinking %}</think>{% endif %}"), on);
        assert_eq!(by_default("{% if not enable_thinking and 1 %}</think>{% endif %}"), on);
        for other in [
            "{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}",
            "{% if not enable_thinking is defined %}{% set enable_thinking = false %}{% endif %}\
             {{ enable_thinking }}",
            "{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}",
            "{% set enable_thinking = enable_thinking | default(true) %}\
             {% if not enable_thinking %}</think>{% endif %}",
            "no switch",
        ] {
            assert_eq!(by_default(other), json!({}), "{other}");
        }
    }

    #[test]
    fn a_variable_that_the_template_sets_from_itself_is_a_switch() {
        for source in [
            "{%- set enable_thinking = enable_thinking | default(true) %}{{ enable_thinking }}",
            "{% set enable_thinking = enable_thinking if enable_thinking is defined else 1 %}",
        ] {
            let expected = Some((json!({"enable_thinking": false}), false));
            assert_eq!(setting(source, Think::Off), expected, "{source}");
        }
    }

    #[test]
    fn efforts_are_those_that_the_template_takes() {
        let source = "{% if reasoning_effort is defined
            and reasoning_effort not in ['no_think', 'low', 'high'] %}
            {{ raise_exception('no') }}{% endif %}";
        let effort = |think| setting(source, think).unwrap().0["reasoning_effort"].clone();
        let expected = ["high", "no_think", "low", "high", "high"];
        assert_eq!(ALL.map(effort), expected.map(Value::from));
        assert_eq!(setting("{{ reasoning_effort }}", Think::Off), None);
    }

    #[test]
    fn reasoning_is_kept_by_the_templates_own_variable() {
        let kept = |source: &str, keep| {
            let template = ChatTemplate::new(source, "", "").unwrap();
            Value::Object(template.keeping_reasoning(keep).unwrap())
        };
        assert_eq!(kept("{{ clear_thinking }}", true), json!({"clear_thinking": false}));
        assert_eq!(kept("{{ clear_thinking }}", false), json!({"clear_thinking": true}));
        assert_eq!(kept("{{ preserve_thinking }}", true), json!({"preserve_thinking": true}));
        assert_eq!(kept("{{ thinking }}", true), json!({}));
    }

    #[test]
    fn a_budget_is_told_to_the_template_that_asks_for_it() {
        let source = "{% if not thinking_budget is defined %}{% set thinking_budget = -1 %}
            {%- endif %}{{ thinking_budget }}";
        let template = ChatTemplate::new(source, "", "").unwrap();
        let budget = template.thinking_budget(9).unwrap();
        assert_eq!(budget, Some(("thinking_budget".into(), json!(9))));
        assert_eq!(setting(source, Think::Off).unwrap().0, json!({"thinking_budget": 0}));
        assert_eq!(setting(source, Think::Low).unwrap().0, json!({"thinking_budget": 512}));
        let other = ChatTemplate::new("{{ enable_thinking }}", "", "").unwrap();
        assert_eq!(other.thinking_budget(9).unwrap(), None);
    }
}
