"""One file per page; each has `page(view)`. (A folder named pages would be taken for the whole app by Streamlit.)"""
