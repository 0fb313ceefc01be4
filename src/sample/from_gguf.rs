//! The sampling that a model file recommends: llama.cpp's keys `general.sampling.*`.

use super::parameters::PARAMETERS;
use super::{SamplerKind, SamplerOptions};
use crate::gguf::{Gguf, Value};

/// Sets what the file recommends of all that `is_given` denies by its flag's name. A value that
/// makes no sense is a warning, and what is set stays.
pub fn recommend(options: &mut SamplerOptions, gguf: &Gguf, is_given: impl Fn(&str) -> bool) {
    if !is_given("samplers") {
        recommend_samplers(options, gguf);
    }
    for parameter in PARAMETERS.iter().filter(|p| !is_given(p.name)) {
        let Some(key) = parameter.key.map(|key| format!("general.sampling.{key}")) else {
            continue;
        };
        let Some(value) = gguf.get(&key) else { continue };
        match number(&value).filter(|x| parameter.takes(*x)) {
            Some(x) => parameter.set(options, x),
            None => warn(gguf, &key, &parameter.expected(), &value, &parameter.text(options)),
        }
    }
}

fn recommend_samplers(options: &mut SamplerOptions, gguf: &Gguf) {
    let key = "general.sampling.sequence";
    let Some(value) = gguf.get(key) else { return };
    let names = value.as_bytes().and_then(|bytes| std::str::from_utf8(bytes).ok());
    match names.map(SamplerKind::from_names) {
        Some(Ok(samplers)) => options.samplers = samplers,
        _ => {
            let used = SamplerKind::DEFAULT.map(SamplerKind::name).join(";");
            warn(gguf, key, "names of samplers between semicolons", &value, &used);
        }
    }
}

fn warn(gguf: &Gguf, key: &str, expected: &str, got: &Value<'_>, used: &str) {
    let (path, got_type) = (gguf.path().display(), got.type_name());
    let got = match got {
        Value::Array(_) => format!("an array of {got}"),
        _ => format!("{got_type} {got}"),
    };
    log::warn!("{path}: {key}: expected {expected}, got {got}; {used} is used");
}

/// Any number. An f64 is rounded to an f32, as flags are.
fn number(value: &Value<'_>) -> Option<f64> {
    let whole = value.as_i64().map(|n| n as f64);
    whole.or_else(|| value.as_f32().map(f64::from))
}

#[cfg(test)]
mod tests {
    use super::super::{MirostatOptions, XtcOptions};
    use super::*;
    use crate::gguf::{OwnedValue, Writer};

    fn file(pairs: &[(&str, OwnedValue)]) -> (tempfile::TempDir, Gguf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        let mut writer = Writer::create(&path, None).unwrap();
        for (key, value) in pairs {
            writer.set(&format!("general.sampling.{key}"), value.clone()).unwrap();
        }
        writer.finish().unwrap();
        let gguf = Gguf::open(&path).unwrap();
        (dir, gguf)
    }

    fn recommended(pairs: &[(&str, OwnedValue)], given: &[&str]) -> SamplerOptions {
        let (_dir, gguf) = file(pairs);
        let mut options = SamplerOptions::default();
        recommend(&mut options, &gguf, |name| given.contains(&name));
        options
    }

    #[test]
    fn the_file_sets_what_no_flag_does() {
        let pairs = [
            ("temp", OwnedValue::F32(0.6)),
            ("top_k", OwnedValue::I32(20)),
            ("top_p", OwnedValue::F64(0.9)),
            ("min_p", OwnedValue::U32(0)),
            ("penalty_repeat", OwnedValue::F32(1.1)),
            ("penalty_last_n", OwnedValue::F32(128.0)),
            ("mirostat", OwnedValue::I32(2)),
            ("mirostat_tau", OwnedValue::F32(4.0)),
            ("mirostat_eta", OwnedValue::F32(0.2)),
            ("xtc_probability", OwnedValue::F32(0.5)),
            ("xtc_threshold", OwnedValue::F32(0.2)),
            ("sequence", OwnedValue::String("top_k;temperature".into())),
        ];
        let expected = SamplerOptions {
            temp: 0.6,
            top_k: 20,
            top_p: 0.9,
            min_p: 0.0,
            repeat_penalty: 1.1,
            repeat_last_n: 128,
            mirostat: MirostatOptions { version: 2, tau: 4.0, eta: 0.2 },
            xtc: XtcOptions { probability: 0.5, threshold: 0.2 },
            samplers: vec![SamplerKind::TopK, SamplerKind::Temperature],
            ..SamplerOptions::default()
        };
        assert_eq!(recommended(&pairs, &[]), expected);
        let kept = SamplerOptions { temp: 0.8, top_k: 40, ..expected };
        assert_eq!(recommended(&pairs, &["temp", "top-k"]), kept);
    }

    #[test]
    fn what_makes_no_sense_is_left_out() {
        let pairs = [
            ("temp", OwnedValue::String("hot".into())),
            ("top_k", OwnedValue::F32(1.5)),
            ("top_p", OwnedValue::F32(1.5)),
            ("min_p", OwnedValue::F32(f32::NAN)),
            ("penalty_repeat", OwnedValue::F32(0.0)),
            ("penalty_last_n", OwnedValue::Bool(true)),
            ("mirostat", OwnedValue::I32(3)),
            ("sequence", OwnedValue::String("top_k;magic".into())),
        ];
        assert_eq!(recommended(&pairs, &[]), SamplerOptions::default());
    }
}
