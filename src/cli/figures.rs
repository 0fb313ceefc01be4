//! Figures as people read them; sizes are in `units`.

use std::time::Duration;

/// "1,024"
pub fn count(n: usize) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() * 4 / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// "1 token", "2 tokens"
pub fn counted(n: usize, noun: &str) -> String {
    let plural = if n == 1 { "" } else { "s" };
    format!("{} {noun}{plural}", count(n))
}

/// "12.3 ms", and seconds from one on.
pub fn time(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    match seconds {
        100.0.. => format!("{seconds:.0} s"),
        1.0.. => format!("{seconds:.1} s"),
        _ => format!("{:.1} ms", 1e3 * seconds),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_short_and_have_their_plural() {
        assert_eq!([0, 999, 1024, 1_234_567].map(count), ["0", "999", "1,024", "1,234,567"]);
        assert_eq!([0, 1, 2].map(|n| counted(n, "token")), ["0 tokens", "1 token", "2 tokens"]);
        let times = [0.0, 0.0123, 2.14, 132.4].map(|s| time(Duration::from_secs_f64(s)));
        assert_eq!(times, ["0.0 ms", "12.3 ms", "2.1 s", "132 s"]);
    }
}
