//! Failures and interruptions. The interrupt flag, the logger and the panic hook belong to the
//! process, so tests take turns.

// A device that fails or is interrupted under a model.
mod gpu;

// Disks that fail, files that shrink, interruptions of streamed models.
mod streamed;

/// Waits for the tests before. One that failed does not stop the next.
fn turn() -> std::sync::MutexGuard<'static, ()> {
    static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());
    TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
