//! `strftime_now(format)`: today's date for the templates that tell the model (Llama 3, gpt-oss).

use crate::{Error, Result};
use std::time::{SystemTime, UNIX_EPOCH};

/// The time that templates see, in UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    System,
    /// Midnight of this day, in days since 1970-01-01.
    Day(i64),
    /// This second since 1970-01-01.
    Second(i64),
}

const WEEKDAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

impl Clock {
    /// The system's time, or the day that MOEBA_NOW=YYYY-MM-DD says.
    pub fn from_environment() -> Result<Self> {
        match std::env::var("MOEBA_NOW") {
            Ok(day) => Self::parse(&day).ok_or_else(|| {
                Error::Usage(format!("MOEBA_NOW: expected a date as YYYY-MM-DD, got `{day}`"))
            }),
            Err(_) => Ok(Self::System),
        }
    }

    /// A day as YYYY-MM-DD.
    pub fn parse(day: &str) -> Option<Self> {
        let digits = |range: std::ops::Range<usize>| {
            let text = day.get(range).filter(|t| t.bytes().all(|b| b.is_ascii_digit()))?;
            text.parse::<i64>().ok()
        };
        let dashes = day.len() == 10 && day.get(4..5)? == "-" && day.get(7..8)? == "-";
        let (year, month, of_month) = (digits(0..4)?, digits(5..7)?, digits(8..10)?);
        let days = days_from_civil(year, month, of_month);
        (dashes && civil_from_days(days) == (year, month, of_month)).then_some(Self::Day(days))
    }

    fn seconds(self) -> i64 {
        match self {
            Self::Day(days) => days * 86_400,
            Self::Second(second) => second,
            Self::System => match SystemTime::now().duration_since(UNIX_EPOCH) {
                Ok(since) => since.as_secs() as i64,
                Err(before) => -(before.duration().as_secs() as i64),
            },
        }
    }

    /// Python's `strftime`, without its locales. Unknown directives stay as they are.
    pub fn format(self, format: &str) -> String {
        let moment = Moment::new(self.seconds());
        let mut out = String::new();
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let directive = chars.next();
            let (plain, directive) = match directive {
                Some('-') => (true, chars.next()), // glibc: without padding
                other => (false, other),
            };
            match directive.and_then(|d| moment.field(d)) {
                Some(field) if plain => out.push_str(field.trim_start_matches(['0', ' '])),
                Some(field) => out.push_str(&field),
                None => {
                    out.push_str(if plain { "%-" } else { "%" });
                    out.extend(directive);
                }
            }
        }
        out
    }
}

struct Moment {
    year: i64,
    month: i64,
    day: i64,
    /// Since 1970-01-01.
    days: i64,
    second_of_day: i64,
}

impl Moment {
    fn new(seconds: i64) -> Self {
        let days = seconds.div_euclid(86_400);
        let (year, month, day) = civil_from_days(days);
        Self { year, month, day, days, second_of_day: seconds.rem_euclid(86_400) }
    }

    fn field(&self, directive: char) -> Option<String> {
        let (hour, minute) = (self.second_of_day / 3600, self.second_of_day / 60 % 60);
        let second = self.second_of_day % 60;
        let (month, day) = (self.month, self.day);
        let weekday = (self.days + 4).rem_euclid(7); // 1970-01-01 was a Thursday
        let month_name = MONTHS[(month - 1) as usize];
        let weekday_name = WEEKDAYS[weekday as usize];
        let parts = |template: &str| -> Option<String> {
            template.split(' ').map(|d| self.field(d.chars().next()?)).collect()
        };
        Some(match directive {
            'Y' => self.year.to_string(),
            'y' => format!("{:02}", self.year.rem_euclid(100)),
            'm' => format!("{month:02}"),
            'd' => format!("{day:02}"),
            'e' => format!("{day:2}"),
            'B' => month_name.into(),
            'b' | 'h' => month_name[..3].into(),
            'A' => weekday_name.into(),
            'a' => weekday_name[..3].into(),
            'u' => (if weekday == 0 { 7 } else { weekday }).to_string(),
            'w' => weekday.to_string(),
            'j' => format!("{:03}", self.days - days_from_civil(self.year, 1, 1) + 1),
            'H' => format!("{hour:02}"),
            'I' => format!("{:02}", (hour + 11) % 12 + 1),
            'p' => (if hour < 12 { "AM" } else { "PM" }).into(),
            'M' => format!("{minute:02}"),
            'S' => format!("{second:02}"),
            'f' => "000000".into(),
            'z' => "+0000".into(),
            'Z' => "UTC".into(),
            'F' => format!("{:04}-{month:02}-{day:02}", self.year),
            'T' | 'X' => format!("{hour:02}:{minute:02}:{second:02}"),
            'R' => format!("{hour:02}:{minute:02}"),
            'D' | 'x' => format!("{month:02}/{day:02}/{}", parts("y")?),
            'c' => format!(
                "{} {} {} {} {}",
                parts("a")?,
                parts("b")?,
                parts("e")?,
                parts("T")?,
                self.year
            ),
            'n' => "\n".into(),
            't' => "\t".into(),
            '%' => "%".into(),
            _ => return None,
        })
    }
}

/// The Gregorian calendar in days since 1970-01-01: years of 365.2425 days counted from March, so
/// that the leap day is the last (Howard Hinnant, "chrono-compatible low-level date algorithms").
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

fn civil_from_days(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let day_of_era = days.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_and_back() {
        assert_eq!(days_from_civil(1970, 1, 1), 0);
        assert_eq!(days_from_civil(2000, 2, 29), 11_016);
        for days in (-1_000_000..1_000_000).step_by(97) {
            let (year, month, day) = civil_from_days(days);
            assert_eq!(days_from_civil(year, month, day), days);
        }
    }

    #[test]
    fn formats() {
        let clock = Clock::parse("2024-07-06").unwrap();
        assert_eq!(clock.format("%d %b %Y"), "06 Jul 2024");
        assert_eq!(clock.format("%A, %B %-d, %y"), "Saturday, July 6, 24");
        assert_eq!(clock.format("%F %T %j %I %p"), "2024-07-06 00:00:00 188 12 AM");
        assert_eq!(clock.format("%c|%x|%e|%%|%Q|%"), "Sat Jul  6 00:00:00 2024|07/06/24| 6|%|%Q|%");
    }

    #[test]
    fn only_real_days_are_accepted() {
        for bad in ["", "2024", "2024-13-01", "2023-02-29", "2024-2-3", "2024-02-30x", "2024/02/03"]
        {
            assert_eq!(Clock::parse(bad), None, "{bad}");
        }
        assert!(Clock::parse("2024-02-29").is_some());
    }
}
