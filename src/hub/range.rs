//! Answers to a request for the rest of a file (RFC 9110, sections 14 and 15.3.7).

/// The facts of an answer that may carry a file.
#[derive(Clone, Copy, Debug, Default)]
pub struct RangeResponse<'a> {
    pub status: u16,
    pub content_range: Option<&'a str>,
    /// The length of this answer's body, not of the whole file.
    pub content_length: Option<u64>,
}

/// The use of the body.
#[derive(Debug, PartialEq, Eq)]
pub enum Plan {
    /// The body goes on where the file ends.
    Append { total: Option<u64> },
    /// The body is the file from its beginning: the server ignored the range, or was asked for
    /// none.
    Restart { total: Option<u64> },
    /// The body is of no use: what there is of the file must go before the next try.
    Discard,
    /// The body is not the file that the listing named.
    Refuse { expected: u64, got: u64 },
}

/// `have` bytes are there; the range from `have` on was asked for, if that is not 0. `expected` is
/// the file's length, where the listing tells it.
pub fn plan(have: u64, expected: Option<u64>, answer: RangeResponse<'_>) -> Plan {
    let plan = match answer.status {
        200 => Plan::Restart { total: answer.content_length },
        206 if have > 0 => match answer.content_range.and_then(parse) {
            Some((start, total)) if start == have => {
                let rest = answer.content_length.map(|rest| have.saturating_add(rest));
                Plan::Append { total: total.or(rest) }
            }
            _ => Plan::Discard,
        },
        _ => Plan::Discard,
    };
    let total = match plan {
        Plan::Append { total } | Plan::Restart { total } => total,
        _ => None,
    };
    match (expected, total) {
        (Some(expected), Some(got)) if expected != got => Plan::Refuse { expected, got },
        _ => plan,
    }
}

/// `bytes 5-9/10` → (5, Some(10)); `bytes 5-9/*` → (5, None)
fn parse(text: &str) -> Option<(u64, Option<u64>)> {
    let (range, total) = text.trim().strip_prefix("bytes ")?.split_once('/')?;
    let (start, end) = range.split_once('-')?;
    let (start, end): (u64, u64) = (start.trim().parse().ok()?, end.trim().parse().ok()?);
    let total = match total.trim() {
        "*" => None,
        total => Some(total.parse::<u64>().ok()?),
    };
    let whole = start <= end && total.is_none_or(|total| end < total);
    whole.then_some((start, total))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn partial(content_range: &str) -> RangeResponse<'_> {
        RangeResponse { status: 206, content_range: Some(content_range), content_length: None }
    }

    #[test]
    fn a_range_that_fits_is_appended() {
        let append = |total| Plan::Append { total };
        assert_eq!(plan(5, Some(10), partial("bytes 5-9/10")), append(Some(10)));
        assert_eq!(plan(5, None, partial("bytes 5-9/*")), append(None));
        let answer = RangeResponse { content_length: Some(5), ..partial("bytes 5-9/*") };
        assert_eq!(plan(5, Some(10), answer), append(Some(10)));
    }

    #[test]
    fn a_server_may_ignore_the_range() {
        let answer = RangeResponse { status: 200, content_range: None, content_length: Some(10) };
        assert_eq!(plan(5, Some(10), answer), Plan::Restart { total: Some(10) });
        assert_eq!(plan(0, None, answer), Plan::Restart { total: Some(10) });
        let chunked = RangeResponse { content_length: None, ..answer };
        assert_eq!(plan(5, Some(10), chunked), Plan::Restart { total: None });
    }

    #[test]
    fn ranges_that_do_not_fit_are_discarded() {
        let bad = [
            "bytes 4-9/10",
            "bytes 6-9/10",
            "bytes 5-4/10",
            "bytes 5-10/10",
            "bytes 5-/10",
            "bytes */10",
            "5-9/10",
            "bytes 5-99999999999999999999/10",
            "",
        ];
        for text in bad {
            assert_eq!(plan(5, None, partial(text)), Plan::Discard, "{text:?}");
        }
        assert_eq!(
            plan(5, None, RangeResponse { status: 206, ..RangeResponse::default() }),
            Plan::Discard
        );
        assert_eq!(
            plan(5, None, RangeResponse { status: 416, ..RangeResponse::default() }),
            Plan::Discard
        );
        assert_eq!(plan(0, None, partial("bytes 0-9/10")), Plan::Discard, "not asked for");
    }

    #[test]
    fn another_length_is_another_file() {
        let refused = Plan::Refuse { expected: 10, got: 11 };
        assert_eq!(plan(5, Some(10), partial("bytes 5-9/11")), refused);
        let huge =
            RangeResponse { status: 200, content_range: None, content_length: Some(u64::MAX) };
        assert_eq!(plan(0, Some(10), huge), Plan::Refuse { expected: 10, got: u64::MAX });
        let answer = RangeResponse { content_length: Some(u64::MAX), ..partial("bytes 5-9/*") };
        assert_eq!(plan(5, Some(10), answer), Plan::Refuse { expected: 10, got: u64::MAX });
    }
}
