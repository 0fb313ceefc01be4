//! `POST /slots/ID?action=save|restore|erase`: texts of slots to files and back, as llama-server
//! has it.

use std::sync::Arc;

use hyper::http::Response;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::api::sampling::NO_SALT;
use super::bodies::{in_background, parsed};
use super::body::Body;
use super::errors::{ApiError, ApiResult, Kind};
use super::fields::Fields;
use super::models::Lease;
use super::router::{Call, json as response};
use crate::engine::scheduler::{AnySink, Core, MovedText, SlotError};

/// Bytes of a file's name at most.
const MAX_NAME: usize = 200;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Save,
    Restore,
    Erase,
}

/// Serves the route.
pub async fn act(call: &mut Call, path: &str) -> ApiResult<Response<Body>> {
    let Some(folder) = call.app.options.slot_save_path.clone() else {
        let why = "start the server with --slot-save-path FOLDER to have this";
        return Err(ApiError::not_supported(why));
    };
    let service = call.looked_at()?;
    let id = slot_id(path, service.info.n_parallel)?;
    let action = action(call.query())?;
    let salt = call.client.salt(NO_SALT);
    if action == Action::Erase {
        let done = between_passes(&service, move |core| core.erase_slot(id, salt)).await?;
        let n = done.map_err(|why| failure(id, &why))?;
        return Ok(response(&json!({ "id_slot": id, "n_erased": n })));
    }
    let app = call.app.clone();
    let body = call.receive().await?;
    let name = in_background(move || {
        let body = parsed(&body.bytes)?;
        let fields = Fields::of(&body, "")?;
        let name = file_name(&fields)?;
        app.note_unknown(&fields);
        Ok::<_, ApiError>(name)
    });
    let name = name.await??;
    let file = folder.join(&name);
    let moved = move |core: &mut Core<AnySink>| match action {
        Action::Save => core.save_slot(id, salt, &file),
        Action::Restore | Action::Erase => core.restore_slot(id, salt, &file),
    };
    let moved = between_passes(&service, moved).await?.map_err(|why| failure(id, &why))?;
    Ok(response(&told(id, action, &name, &moved)))
}

fn told(id: usize, action: Action, name: &str, moved: &MovedText) -> Value {
    let [tokens, bytes, time] = match action {
        Action::Save => ["n_saved", "n_written", "save_ms"],
        Action::Restore | Action::Erase => ["n_restored", "n_read", "restore_ms"],
    };
    let ms = moved.time.as_micros() as f64 / 1e3;
    json!({
        "id_slot": id,
        "filename": name,
        tokens: moved.text.n_tokens,
        bytes: moved.text.n_bytes,
        "timings": { time: ms },
    })
}

/// Runs work on the scheduler's thread between two passes.
async fn between_passes<T: Send + 'static>(
    service: &Arc<Lease>,
    work: impl FnOnce(&mut Core<AnySink>) -> T + Send + 'static,
) -> ApiResult<T> {
    let (sender, receiver) = oneshot::channel();
    service.scheduler.between_passes(Box::new(move |core| {
        // Whoever has asked may have gone.
        let _ = sender.send(work(core));
    }));
    receiver.await.map_err(|_| ApiError::shutting_down())
}

fn slot_id(path: &str, n_slots: usize) -> ApiResult<usize> {
    let id = path.strip_prefix("/slots/").and_then(|id| id.parse::<usize>().ok());
    id.filter(|id| *id < n_slots).ok_or_else(|| {
        let message = format!("expected the number of a slot, from 0 to {}", n_slots - 1);
        ApiError::invalid("id_slot", message)
    })
}

fn action(query: &str) -> ApiResult<Action> {
    let given = query.split('&').find_map(|part| part.strip_prefix("action="));
    match given {
        Some("save") => Ok(Action::Save),
        Some("restore") => Ok(Action::Restore),
        Some("erase") => Ok(Action::Erase),
        _ => Err(ApiError::invalid("action", "action: expected save, restore or erase")),
    }
}

/// The file's name: one in the folder itself, and no hidden one.
fn file_name(fields: &Fields<'_>) -> ApiResult<String> {
    let name = fields.required("filename")?;
    let is_plain = |c: char| !c.is_control() && !"/\\:*?\"<>|".contains(c);
    let is_safe = (1..=MAX_NAME).contains(&name.len())
        && name.chars().all(is_plain)
        && !name.starts_with('.')
        && !name.ends_with(['.', ' '])
        && !name.ends_with(".unfinished");
    match is_safe {
        true => Ok(name.into()),
        false => {
            let message = format!(
                "filename: expected a name of up to {MAX_NAME} bytes without slashes and without a \
                 dot at its beginning"
            );
            Err(ApiError::invalid("filename", message))
        }
    }
}

fn failure(id: usize, why: &SlotError) -> ApiError {
    match why {
        SlotError::Busy => {
            let message = format!("slot {id} is at work: try again when it is idle");
            let error = ApiError::new(Kind::Overloaded, "slot_busy", message);
            ApiError { retry_after: Some(1), ..error }
        }
        SlotError::NoText => {
            let message = format!("slot {id} holds no text of yours");
            ApiError::new(Kind::Invalid, "slot_empty", message)
        }
        SlotError::NoRoom => {
            let message = "other texts need the memory: try again when they have ended";
            let error = ApiError::new(Kind::Overloaded, "no_room", message);
            ApiError { retry_after: Some(5), ..error }
        }
        SlotError::File(why) => ApiError::invalid("filename", format!("filename: {why}")),
        SlotError::Other(why) => ApiError::of_run(why),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_names_are_files() {
        let of = |body: &Value| file_name(&Fields::of(body, "")?);
        let name = |name: &str| of(&json!({ "filename": name }));
        for good in ["a", "slot 1.bin", "Überblick.kv", "a..b"] {
            assert_eq!(name(good).unwrap(), good);
        }
        let long = "x".repeat(MAX_NAME + 1);
        let bad =
            ["", ".", "..", ".a", "a/b", "/etc/passwd", "..\\x", "a\0", "a\n", "a.", "a ", "C:x"];
        for bad in bad.into_iter().chain([&*long, "a.unfinished"]) {
            assert!(name(bad).is_err(), "{bad:?}");
        }
        assert!(of(&json!({})).is_err() && of(&json!({ "filename": 3 })).is_err());
    }

    #[test]
    fn slots_and_actions_are_known_ones() {
        assert_eq!(slot_id("/slots/1", 2).unwrap(), 1);
        for bad in ["/slots/2", "/slots/-1", "/slots/1/x", "/slots/x", "/slots/"] {
            assert!(slot_id(bad, 2).is_err(), "{bad}");
        }
        assert_eq!(action("x=1&action=erase").unwrap(), Action::Erase);
        assert!(action("").is_err() && action("action=delete").is_err());
    }
}
