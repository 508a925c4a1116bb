//! The status page as one self-contained HTML document; it refreshes itself every two seconds.

use std::fmt::Write as _;

/// A page: a title and sections.
#[derive(Clone, Debug)]
pub struct Page {
    title: String,
    sections: Vec<Section>,
}

/// A titled table.
#[derive(Clone, Debug)]
pub struct Section {
    title: String,
    rows: Vec<Vec<String>>,
}

impl Section {
    /// Names with their values.
    pub fn facts(title: &str, facts: Vec<(String, String)>) -> Self {
        let rows = facts.into_iter().map(|(name, value)| vec![name, value]).collect();
        Self { title: title.to_owned(), rows }
    }

    /// A table with a head.
    pub fn table(title: &str, head: &[&str], rows: Vec<Vec<String>>) -> Self {
        let head = head.iter().map(|&cell| cell.to_owned()).collect();
        Self { title: title.to_owned(), rows: std::iter::once(head).chain(rows).collect() }
    }
}

const STYLE: &str = "\
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;\
color:#1c2430;background:#fbfbf9}\
h1{font-size:1.4rem}h2{font-size:1rem;margin:1.6rem 0 .3rem;color:#8a5a00}\
table{border-collapse:collapse;width:100%}\
td{text-align:left;padding:.15rem .8rem .15rem 0;border-bottom:1px solid #e6e3da;\
font-variant-numeric:tabular-nums}\
td:first-child{color:#555}footer{margin-top:2rem;color:#777}\
@media(prefers-color-scheme:dark){body{background:#15181c;color:#dcdcd6}h2{color:#e0a940}\
td{border-color:#2b3037}td:first-child{color:#9aa}}";

impl Page {
    /// A page without sections.
    pub fn new(title: &str) -> Self {
        Self { title: title.to_owned(), sections: Vec::new() }
    }

    /// Adds a section below the others.
    pub fn push(&mut self, section: Section) {
        self.sections.push(section);
    }

    /// The document.
    pub fn html(&self) -> String {
        let mut html = String::new();
        self.write(&mut html).unwrap_or_else(|_| unreachable!("writing to a string does not fail"));
        html
    }

    fn write(&self, html: &mut String) -> std::fmt::Result {
        let title = escape(&self.title);
        write!(
            html,
            "<!doctype html><html lang=en><meta charset=utf-8>\
             <meta name=viewport content=\"width=device-width\">\
             <meta http-equiv=refresh content=2><title>{title}</title>\
             <style>{STYLE}</style><h1>{title}</h1>"
        )?;
        for section in &self.sections {
            write!(html, "<h2>{}</h2><table>", escape(&section.title))?;
            for row in &section.rows {
                html.push_str("<tr>");
                for cell in row {
                    write!(html, "<td>{}</td>", escape(cell))?;
                }
                html.push_str("</tr>");
            }
            html.push_str("</table>");
        }
        html.push_str(
            "<footer><a href=/metrics>metrics</a> · <a href=/stats.json>stats.json</a> · \
             <a href=/healthz>healthz</a></footer></html>",
        );
        Ok(())
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
